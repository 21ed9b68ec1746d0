"""Clusters that others measured: how far predictions are from them, and what the page says."""

import importlib
import json
import pathlib
import statistics

import pytest

pytest.importorskip("matplotlib")
ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/others"
TOLD = json.loads((ROOT / "benchmarks/results/others/clusters.json").read_text())
MOST = {
    "L40S, DiLoCo": (0.06, 0.21),
    "L40S, LocalSGD, held back": (0.08, 0.22),
    "L40S, LocalSGD, by the rate of DiLoCo, H = 1": (0.05, 0.2),
    "L40S, DDP, by the rate of DiLoCo, H = 1": (0.08, 0.12),
}
"""Of a group the median error and the worst that are allowed."""


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cluster")


def test_their_local_steps_and_their_ddp_are_predicted(cluster):
    for group, (median, worst) in MOST.items():
        found = [abs(error) for error in cluster.errors(TOLD["rows"], group)]
        assert statistics.median(found) <= median, group
        assert max(found) <= worst, group


def test_half_of_what_ddp_took_longer_is_what_it_broadcasts(cluster):
    alone = cluster.errors(TOLD["rows"], "L40S, DDP, its gradient alone")
    whole = cluster.errors(TOLD["rows"], "L40S, DDP, with its broadcast")
    assert statistics.median(whole) > statistics.median(alone) / 2
    assert all(low < high < 0 for low, high in zip(alone, whole, strict=True))


def test_planned_orders_are_theirs():
    assert len(TOLD["orders"]) == 4
    for setting, (planned, measured) in TOLD["orders"].items():
        assert planned == measured, setting
        assert measured[0] == "DiLoCo H = 128"


@pytest.mark.parametrize("name", ["l40s", "one_bit_adam", "p3dn", "horovod", "ddp"])
def test_the_file_is_what_the_sources_make(cluster, name):
    rows = [row for row in TOLD["rows"] if row["source"] == name]
    runs = cluster.runs(name)
    assert len(runs) == len(rows)
    for run, row in zip(runs, rows, strict=True):
        assert run.measured == pytest.approx(row["measured"], rel=1e-5)
    for run, row in (*zip(runs, rows, strict=True),)[:: max(1, len(rows) // 3)]:
        assert cluster.predicted(run, run.bandwidth) == pytest.approx(row["predicted"], rel=1e-4)


def test_each_source_says_whose_and_where(cluster):
    assert {path.stem for path in (FOLDER / "clusters").glob("*.json")} == set(cluster.SOURCES)
    text = (ROOT / "docs/others.md").read_text()
    for name in cluster.SOURCES:
        own = cluster.source(name)
        assert all(own[key] for key in ("whose", "year", "where", "address", "licence", "read"))
        assert own["address"] in text


def test_the_table_is_that_of_the_file(cluster):
    assert cluster.summary_table(TOLD["rows"]) in (ROOT / "docs/others.md").read_text()
