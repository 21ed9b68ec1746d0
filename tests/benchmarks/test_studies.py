"""What the studies compute, on vectors and runs whose answer is known."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from processes import ROOT

import fftgrad as fg

pytest.importorskip("matplotlib")
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
    handed = fg.wire_bytes(row.made(methods.Setting(8)), LIKE)
    run = {"ratio": dense / handed, "mean_ratio": dense / handed}
    for workers in (8, 64):
        exact, own = (
            fg.link_bytes(made, LIKE, workers)
            for made in (fg.AllReduce(), row.made(methods.Setting(workers)))
        )
        assert row.on_link(run, workers) == pytest.approx(exact / own, rel=0.03)


@pytest.mark.full
def test_workers_as_rows_train_as_devices_do(imported):
    program, task = imported("program"), imported("tasks").TASKS["lm"](True)
    method = imported("methods").BY_NAME["4 local steps of Adam, 25x"]
    mesh, ends = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), []
    for devices in (True, False):
        made = program.Program(task, method, 5, mesh, devices)
        at, batches = made.fresh(task.params(0)), task.batches(0, 4)
        for _ in range(5):
            at, losses = made.step(at, next(batches), 0.01)
        assert losses.shape == (4,)
        ends.append((made.common(at), losses))
    assert jax.tree.structure(ends[0]) == jax.tree.structure(ends[1])
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
