"""What the studies compute, on vectors and runs whose answer is known."""

import json
import subprocess
import sys

import jax
import pytest
from processes import ROOT

import fftgrad as fg

LIKE = {
    "w": jax.ShapeDtypeStruct((1 << 10, 1 << 10), "float32"),
    "b": jax.ShapeDtypeStruct((1 << 10,), "float32"),
}


@pytest.mark.slow
def test_a_smoke_run_writes_its_results(tmp_path):
    script = ROOT / "benchmarks/convergence.py"
    command = [sys.executable, script, "seeds", "--smoke", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    content = json.loads((tmp_path / "seeds.json").read_text())
    assert content["command"].startswith("python ")
    (run,) = content["runs"]
    assert (run["task"], run["steps"], run["seed"]) == ("photographs", 4, 0)


def test_a_loss_is_reached_between_two_assessments(imported):
    reached = imported("tables").reached
    curve = [[50, 3.0], [100, 2.0], [150, 2.2], [200, 1.0]]
    found = [reached(curve, loss) for loss in (2.5, 2.0, 1.6, 3.5, 0.9)]
    assert found == [75, 100, 175, 50, None]


@pytest.mark.parametrize(
    "name",
    [
        "dense, Muon", "100x, Muon, lead 0.5", "two stages 25x, Muon, lead 0.3",
        "eigenbasis 50x, Muon, lead 0.3", "PowerSGD rank 4, Muon, lead 0.3",
    ],
)  # fmt: skip
def test_a_run_of_eight_workers_says_what_crosses_a_link(imported, name):
    """The ratios of the tables are those of `fg.link_bytes`."""
    methods = imported("methods")
    row = methods.BY_NAME[name]
    dense = sum(leaf.size * 4 for leaf in LIKE.values())
    run = {"mean_ratio": dense / fg.wire_bytes(row.made(8), LIKE)}
    for workers in (8, 64):
        exact, own = (
            fg.link_bytes(made, LIKE, workers) for made in (fg.AllReduce(), row.made(workers))
        )
        assert row.on_link(run, workers) == pytest.approx(exact / own, rel=0.03)
