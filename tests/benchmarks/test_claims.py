"""What the benchmarks of the papers' claims compute, on vectors whose answer is known."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def studies(imported):
    return imported("studies")


def test_residuals_that_are_alike(imported):
    overlap = imported("columns").overlap
    rng = np.random.default_rng(0)
    common, own = rng.standard_t(3, 1000), rng.standard_t(3, (8, 1000))
    assert overlap(np.tile(common, (8, 1))) == 1
    assert overlap(own) < 0.5


@pytest.mark.slow
def test_a_smoke_run_writes_its_results(tmp_path):
    script = BENCHMARKS / "convergence.py"
    command = [sys.executable, script, "claims", "--smoke", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    content = json.loads((tmp_path / "training.json").read_text())
    assert content["command"].startswith("python ")
    assert len(content["runs"]) == 4
    for run in content["runs"]:
        assert (run["task"], run["steps"], run["seed"]) == ("digits", 4, 0)
        assert ("overlap" in run) == run["method"].startswith("ScaleCom")
