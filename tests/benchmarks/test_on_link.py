"""The ratios of the tables are those of `fg.link_bytes`."""

import importlib
import pathlib

import jax
import pytest

import fftgrad as fg

BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"
LIKE = {
    "w": jax.ShapeDtypeStruct((1 << 10, 1 << 10), "float32"),
    "b": jax.ShapeDtypeStruct((1 << 10,), "float32"),
}


@pytest.mark.parametrize(
    "name",
    [
        "dense, Muon", "100x, Muon, lead 0.5", "two stages 25x, Muon, lead 0.3",
        "eigenbasis 50x, Muon, lead 0.3", "PowerSGD rank 4, Muon, lead 0.3",
    ],
)  # fmt: skip
def test_a_run_of_eight_workers_says_what_crosses_a_link(monkeypatch, name):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    methods = importlib.import_module("methods")
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
