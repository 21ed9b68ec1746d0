"""The founding papers' claims again, and the speed-ups that papers name."""

import json
import pathlib

import pytest

import fftgrad as fg

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture
def seeds(imported):
    return imported("seeds")


def record(path):
    return json.loads((RESULTS / path).read_text())


def test_the_rows_stand_beside_those_of_the_loss_at_the_end(seeds):
    lines = seeds.beside(record("convergence/seeds.json")).splitlines()
    found = [line.split("|")[1].strip() for line in lines[2:]]
    assert found[:2] == list(seeds.DENSE)
    assert found[2:5] == ["100x, Muon, lead 0.5", "30x, Muon, lead 0.3", "300x, Muon, lead 0.5"]
    assert found[5:] == [row.name for row in seeds.ROWS]


@pytest.mark.parametrize("file", ["seeds", "seeds-64"])
def test_the_best_rate_of_each_row_has_a_worse_one_on_both_sides(imported, file):
    runs = record(f"convergence/{file}.json")["runs"]
    score = imported("program").score
    for task, method in {(run["task"], run["method"]) for run in runs}:
        own = [
            run for run in runs if (run["task"], run["method"], run["seed"]) == (task, method, 0)
        ]
        best = min(own, key=score)["rate"]
        assert {best / 2, best, 2 * best} <= {run["rate"] for run in own}, (task, method)


def test_rows_are_what_their_names_say(seeds):
    for row in (*seeds.ROWS, *seeds.LEARNERS):
        _, led, lead = row.name.partition("lead ")
        assert (row.optimizer is not None) == bool(led), row.name
        if led:
            assert row.optimizer.keywords == {"lead": float(lead)}
        if "x, " in row.name and "one vector" not in row.name and "FFT" in row.name:
            assert row.exchange.exchange.codec.stages[-1] == fg.Budget(ratio=30)
    found = {row.name: row.exchange for row in seeds.LEARNERS}
    assert {name: found[name].memory.uptake for name in found if "ScaleCom" in name} == {
        "ScaleCom 65x, Adam": 0.1,
        "ScaleCom 400x, Adam": 0.1,
        "ScaleCom 65x, Muon, lead 0.5": 1.0,
        "ScaleCom 400x, one vector, Muon, lead 0.5": 1.0,
    }


@pytest.mark.parametrize(("study", "workers", "steps"), [("seeds", 8, 1000), ("seeds-64", 64, 150)])
def test_runs_are_those_of_the_study(imported, study, workers, steps):
    told, own = record(f"convergence/{study}.json"), imported("convergence").STUDIES[study]
    assert told["workers"] == own.workers == workers
    assert {run["steps"] for run in told["runs"]} == {own.steps} == {steps}
