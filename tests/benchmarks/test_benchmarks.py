"""Benchmarks and examples: what they import, and what their results hold."""

import ast
import json

import pytest
from processes import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").rglob("*.json"))
SCRIPTS = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])


def imports_of_fftgrad(source):
    """What a program imports of the library, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] == "fftgrad"]
        elif isinstance(node, ast.ImportFrom):
            found = [node] if (node.module or "").split(".")[0] == "fftgrad" else []
        else:
            continue
        yield from (ast.unparse(node) for _ in found)


def private_names(source):
    """The names with a leading underscore that a program takes from `fg`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id == "fg":
                yield ast.unparse(node)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_use_public_names_only(script):
    source = script.read_text()
    extras = {"from fftgrad import checkpoint"}
    extras |= {f"from fftgrad.contrib import {own}" for own in ("gossip", "votes")}
    allowed = {"import fftgrad as fg"} | extras
    if script.name == "timings.py":  # it makes a table of the package, and runs what a plan runs
        allowed.add("from fftgrad.planning import _timing")
    assert set(imports_of_fftgrad(source)) <= allowed
    assert not list(private_names(source))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_say_where_they_come_from(path):
    content = json.loads(path.read_text())
    assert content["command"].startswith("python ")
    assert content["device"]
