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
    allowed |= {f"from fftgrad.contrib import {own}" for own in ("gossip", "votes")}
    if script.name == "timings.py":  # it makes a table of the package, and runs what a plan runs
        allowed.add("from fftgrad.planning import _timing")
    imported = re.findall(r"^ *((?:from|import) fftgrad\b.*)", source, re.MULTILINE)
    assert set(imported) <= allowed
    assert not re.search(r"\bfg(\.\w+)*\._", source)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_say_where_they_come_from(path):
    content = json.loads(path.read_text())
    assert content["command"].startswith("python ")
    assert content["device"]
