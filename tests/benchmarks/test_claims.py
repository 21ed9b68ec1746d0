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


def test_thetas_fall_where_the_rate_does(studies):
    found = [method.name for method in studies.STUDIES["claims"].rows]
    assert found[0] == "dense"
    assert {f"theta {theta}" for theta in (0.5, 0.7, 0.85, 0.9, 0.99)} < set(found)
    assert {"theta 0.9, then 0", "theta 0.99, then 0"} < set(found)
    rates = [float(studies.cut(2.0, 180)(step)) for step in (0, 129, 130, 179)]
    assert rates == pytest.approx([2.0, 2.0, 0.2, 0.2])


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


def test_a_table_has_the_means_of_the_seeds(studies):
    seeds = [{"loss": 0.1, "accuracy": 0.5}, {"loss": 0.2, "accuracy": 1.0}]
    runs = [{"task": "digits", "method": "dense", **seed} for seed in seeds]
    *_, row = studies.tables.claims({"runs": runs}).splitlines()
    assert row == "| dense | 0.150 | 75.0 |  |  |  |"
