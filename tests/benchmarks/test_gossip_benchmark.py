"""The benchmark of gossip, small, and what its results say."""

import json
import pathlib
import runpy
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results/gossip/least_squares.json"


def test_it_writes_results_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["gossip.py", "--smoke", "--out", str(tmp_path)])
    runpy.run_path(str(BENCHMARKS / "gossip.py"), run_name="__main__")
    assert "CHOCO-SGD" in capsys.readouterr().out
    content = json.loads((tmp_path / "least_squares.json").read_text())
    runs = content["found"]["tuned"]["ring"]
    assert len(runs) == 2
    last = [row[content["columns"].index("last")] for row in runs.values()]
    assert max(last) < 0
    assert "<svg" in (tmp_path / "gossip.svg").read_text()


@pytest.mark.parametrize("problem", ["tuned", "other"])
@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_the_results_show_what_the_page_says(problem, graph):
    content = json.loads(RESULTS.read_text())
    runs = {
        name: dict(zip(content["columns"], row, strict=True))
        for name, row in content["found"][problem][graph].items()
    }
    linear = ["BEER, top-k 10 %, 6 bits", "BEER, 4 bits", "BEER, one bit, dynamic"]
    exact = runs["gradient tracking, float32"]
    for name in linear:
        run = runs[name]
        assert run["last"] < -4.9
        assert run["slope"] < 0
        assert run["to_1e-4"] * run["link_bytes"] < exact["to_1e-4"] * exact["link_bytes"] / 7
    for name in runs.keys() - {*linear, "gradient tracking, float32"}:
        assert runs[name]["to_1e-4"] is None


def test_a_table_has_what_a_method_takes_or_where_it_stops(imported):
    there, stops = [100, 5, 2000, -4.0, None], [10, 5, None, -1.5, None]
    found = {"tuned": {"ring": {"a": there, "b": stops}}}
    found["other"] = {"ring": {"a": stops, "b": there}}
    first, second = imported("gossip").tables({"found": found}).splitlines()[2:]
    assert first == "| a | 100 | 2,000 | 200 |  | stops: -1.5 |"
    assert second == "| b | 10 |  | stops: -1.5 | 2,000 | 20 |"
