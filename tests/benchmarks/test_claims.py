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


def test_residuals_that_are_alike(studies):
    rng = np.random.default_rng(0)
    common, own = rng.standard_t(3, 1000), rng.standard_t(3, (8, 1000))
    same = studies.chosen_by(np.tile(common, (8, 1)))
    assert studies.mean_cosine(np.tile(common, (8, 1))) == pytest.approx(1)
    assert same["overlap"] == 1
    assert same["lost"] == pytest.approx(same["least"])
    k = -(-1000 // studies.CHUNK)
    left = np.sort(common**2)[:-k].sum() / np.sum(common**2)
    assert same["least"] == pytest.approx(left)
    apart = studies.chosen_by(own)
    assert abs(studies.mean_cosine(own)) < 0.1
    assert apart["overlap"] < 0.5
    assert apart["least"] < apart["lost"] < 1


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
    first, second = studies.tables.claims({"runs": runs}).split("\n\n")
    assert first.splitlines()[2] == "| dense | 0.150 | 75.0 | |"
    assert len(second.splitlines()) == 2
