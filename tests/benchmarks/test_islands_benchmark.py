"""The benchmark of islands, small, and what its results say."""

import json
import pathlib

import pytest

pytest.importorskip("obstore")
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results/islands"
PAGE = BENCHMARKS.parent / "docs/results/islands.md"


@pytest.mark.processes
def test_it_writes_results_and_a_figure(imported, tmp_path, capsys):
    imported("islands").main(["--smoke", "--out", str(tmp_path)])
    assert "preempted" in capsys.readouterr().out
    runs = json.loads((tmp_path / "preempted.json").read_text())["runs"]
    whole, away = runs
    assert [what for _, what in away["events"]] == ["killed", "started"]
    assert away["tokens"] >= whole["tokens"] * 0.9
    (run,) = json.loads((tmp_path / "many.json").read_text())["runs"]
    assert run["creates"] >= 1
    assert "<svg" in (tmp_path / "islands_away.svg").read_text()


@pytest.mark.parametrize("name", ["preempted", "links", "many"])
def test_the_tables_of_the_page_are_those_of_the_results(imported, name):
    module = imported("islands")
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    assert module.page_table(name, runs) in PAGE.read_text()
