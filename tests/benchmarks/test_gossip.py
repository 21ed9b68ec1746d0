"""The benchmark of gossip, small, and what its results say."""

import json
import pathlib
import runpy
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results/gossip/least_squares.json"


def test_it_writes_results_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["gossip.py", "--smoke", "--out", str(tmp_path)])
    runpy.run_path(str(BENCHMARKS / "gossip.py"), run_name="__main__")
    assert "CHOCO-SGD" in capsys.readouterr().out
    content = json.loads((tmp_path / "least_squares.json").read_text())
    assert [run["graph"] for run in content["runs"]] == ["Ring()"] * 2
    assert all(np.isfinite(run["last"]) and run["last"] < 0 for run in content["runs"])
    assert (tmp_path / "gossip.png").stat().st_size > 10_000


@pytest.mark.parametrize("problem", ["tuned", "other"])
@pytest.mark.parametrize("graph", ["Ring()", "Exponential()"])
def test_the_results_show_what_the_page_says(problem, graph):
    runs = {
        run["method"]: run
        for run in json.loads(RESULTS.read_text())["runs"]
        if (run["problem"], run["graph"]) == (problem, graph)
    }
    linear = ["BEER, top-k 10 %, 6 bits", "BEER, 4 bits", "BEER, one bit, dynamic"]
    for name in linear:
        assert runs[name]["last"] < -4.5
        assert runs[name]["slope"] < 0
    exact = runs["gradient tracking, float32"]["link_bytes_to_1e-4"]
    for name in linear:
        assert runs[name]["link_bytes_to_1e-4"] < exact / 5
    for name, run in runs.items():
        if not name.startswith(("BEER", "gradient")):
            assert run["least"] > -2.1
