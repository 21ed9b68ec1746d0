"""Benchmarks and examples: what they import, and what their results hold."""

import json
import re

import pytest
from processes import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").rglob("*.json"))
SCRIPTS = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_use_public_names_only(script):
    source = script.read_text()
    allowed = {"import fftgrad as fg", "from fftgrad import checkpoint"}
    allowed |= {
        f"from fftgrad.contrib import {own}" for own in ("gossip", "learned", "learned, votes")
    }
    if script.name == "timings.py":  # it makes a table of the package, and runs what a plan runs
        allowed.add("from fftgrad.planning import _timing")
    imported = re.findall(r"^ *((?:from|import) fftgrad\b.*)", source, re.MULTILINE)
    assert set(imported) <= allowed
    assert not re.search(r"\bfg(\.\w+)*\._", source)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_say_where_they_come_from_and_keep_few_points_of_a_curve(path):
    content = json.loads(path.read_text())
    assert content["command"].startswith("python ")
    assert content["device"]
    for run in content.get("runs", []):
        assert "curve" not in run
        assert len(run.get("losses", [])) <= 10
        assert len(run.get("assessed", [])) <= 20


def test_few_losses_are_kept(imported):
    record = imported("_record")
    losses = [float(step) for step in range(1, 61)]
    assert [step for step, _ in record.few(losses)] == [1, 2, 5, 10, 20, 50, 60]
    assert all(step == loss for step, loss in record.few(losses))
    assert record.few([]) == []
    assert record.few([3.0]) == [(1, 3.0)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("length", [0, 1, 20, 21, 29, 400])
def test_a_thinned_curve_keeps_its_ends_and_when_it_was_first_as_good(imported, sign, length):
    curve = [[step, sign * min(step, length - 4)] for step in range(length)]
    thinned = imported("_record").thin(curve)
    assert len(thinned) <= 20
    assert all(point in curve for point in thinned)
    if length > 4:
        assert thinned[0] == curve[0]
        assert thinned[-1] == curve[-1]
        assert curve[length - 4] in thinned
