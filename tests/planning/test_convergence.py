"""What is said of the loss is what the committed runs say."""

import importlib
import json
import statistics

import jax
import pytest
from processes import ROOT

import fftgrad as fg
from fftgrad.planning import _candidates

RUNS = {
    "two stages 25x, Muon": "two stages 25x, Muon, lead 0.3",
    "eigenbasis 50x, Muon": "eigenbasis 50x, Muon, lead 0.3",
    "random-k 10 %": "random-k 10 % + EF",
    "PowerSGD 4, Muon": "PowerSGD rank 4, Muon, lead 0.3",
    "PowerSGD rank 4": "PowerSGD rank 4, Adam, lead 0.3",
    "ACP-SGD rank 4": "ACP-SGD rank 4, no momentum",
    "signs, two stages": "sign",
    "2 bits, two stages": "lloyd-max",
    "4 local steps, signs": "local-4",
    "4 local steps, two stages, Muon": "4 local steps of Muon, two stages 12x",
}
"""What the runs call a candidate, where that is another name."""
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


def test_the_classes_are_those_of_the_committed_runs(figures):
    def runs(steps):
        path = BENCHMARKS / f"results/convergence/steps-{steps}.json"
        return json.loads(path.read_text())["runs"]

    lm, digits = figures.chosen(runs(200), "lm"), figures.chosen(runs(200), "digits")
    longer = [figures.chosen(runs(steps), "lm") for steps in (2000, 400)]

    def mean(rows, key):
        return statistics.mean(row[key] for row in rows)

    for row, seen in _candidates.SEEN.items():
        name = RUNS.get(row, row)
        if not isinstance(seen, _candidates.Tuned):
            continue
        loss = 100 * (mean(lm[name], "loss") / mean(lm["dense"], "loss") - 1)
        lost = 100 * (mean(digits["dense"], "accuracy") - mean(digits[name], "accuracy"))
        assert seen[:2] == pytest.approx((loss, lost), abs=0.051), name
        later = [
            100 * (mean(rows[name], "loss") / mean(rows["dense"], "loss") - 1)
            for rows in longer
            if name in rows
        ]
        if seen.later is None:
            assert not later, name
        else:
            assert seen.later == pytest.approx(later[0], abs=0.051), name


def test_so_are_those_of_the_held_out_tasks(figures):
    methods = importlib.import_module("methods")
    runs = json.loads((BENCHMARKS / "results/convergence/ends.json").read_text())["runs"]
    held_out = {r: s for r, s in _candidates.SEEN.items() if isinstance(s, _candidates.HeldOut)}
    matrix = jax.ShapeDtypeStruct((9, 9), "float32")
    rows = {row.name: row for row in fg.planning.candidates(matrix, 8)}
    trained = {row.name: row for row in methods.ENDS}
    assert held_out
    for row, seen in held_out.items():
        own = trained[RUNS.get(row, row)]
        assert rows[row].every == own.every
        if own.every == 1:
            assert rows[row].recipe == own.made(methods.Setting(8))
            assert rows[row].optimizer.keywords == own.optimizer.keywords
        sent = {run["mean_ratio"] for run in runs if run["method"] == own.name}
        if isinstance(rows[row].recipe.exchange, fg.TwoStage):  # of 9 messages one stays
            ratio = own.every * rows[row].recipe.exchange.codec.ratio * 8 / 9
            assert sorted(sent) == pytest.approx([ratio] * len(sent), rel=0.02)
        above = []
        for task in sorted({run["task"] for run in runs if run["method"] == own.name}):
            found = figures.chosen(runs, task)
            loss = figures.mean_loss(found, RUNS.get(row, row))
            above.append(100 * (loss / figures.best_dense(found) - 1))
        assert len(above) == seen.tasks
        assert seen[:2] == pytest.approx((statistics.mean(above), max(above)), abs=0.051), row


def test_so_are_those_of_steps():
    folder = BENCHMARKS / "results/slow_network"
    runs = [
        run
        for path in folder.glob("lm-100mbit*.json")
        for run in json.loads(path.read_text())["runs"]
    ]
    longer = {RUNS[row]: seen.steps for row, seen in _candidates.SEEN.items()
              if isinstance(seen, _candidates.Longer)}  # fmt: skip
    steps = {
        name: statistics.mean(run["assessed"][-1][0] for run in runs if run["method"] == name)
        for name in ("dense", *longer)
    }
    assert len(longer) == 3
    for name, wanted in longer.items():
        assert wanted == pytest.approx(steps[name] / steps["dense"], abs=0.01)


def test_kinds():
    held_out, tuned, longer = _candidates.HeldOut, _candidates.Tuned, _candidates.Longer
    kinds = [held_out(mean, 9.0).kind for mean in (-1.0, 1.0, 1.1, 3.0, 3.1, 8.0, 8.1)]
    assert {held_out(mean, 9.0, tasks=1).kind for mean in (0.0, 3.0, 8.0)} == {"check"}
    assert kinds == ["as dense"] * 2 + ["close"] * 2 + ["check"] * 2 + ["worse"]
    assert tuned(-2.0, 0.0).kind == tuned(8.0, 2.0).kind == tuned(0.0, 0.0, 8.0).kind == "check"
    assert (
        tuned(9.0, 0.0, 0.0).kind
        == tuned(0.0, 0.0, 9.0).kind
        == tuned(8.1, 0.0).kind
        == tuned(0.0, 2.1).kind
        == "worse"
    )
    assert [longer(x).kind for x in (1.2, 1.5, 1.6)] == ["check", "check", "worse"]
