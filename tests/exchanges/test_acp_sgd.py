"""`AcpSgd`: one sum of the same size in every step, and a turn that only a good step takes."""

import itertools

import jax
import numpy as np
import pytest
from cases import gradients
from parallel import AXIS
from stepwise import run, stacked

import fftgrad as fg

WORKERS = 4
MODEL = {
    "square": jax.ShapeDtypeStruct((32, 32), "float32"),
    "wide": jax.ShapeDtypeStruct((12, 48), "float32"),
    "wider": jax.ShapeDtypeStruct((16, 40), "float32"),
    "conv": jax.ShapeDtypeStruct((3, 3, 4, 8), "float32"),
    "tall": jax.ShapeDtypeStruct((40, 10), "float32"),
    "bias": jax.ShapeDtypeStruct((10,), "float32"),
}
LEAF = fg.Bucketing("leaf")


# Bytes


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_sends_about_half_of_what_two_sums_do(rank):
    ours, theirs = (
        fg.wire_bytes(kind(rank), MODEL, LEAF) for kind in (fg.exchanges.AcpSgd, fg.PowerSgd)
    )
    assert ours <= 0.55 * theirs
    assert fg.link_bytes(fg.exchanges.AcpSgd(rank), MODEL, 8, LEAF) == 2 * 7 / 8 * ours


@pytest.mark.parametrize("seed", range(5))
def test_the_two_kinds_of_steps_are_balanced(seed):
    """No choice of who goes first would save more than a twentieth."""
    shapes = np.random.default_rng(seed).integers(8, 200, (9, 2)).tolist()
    like = [jax.ShapeDtypeStruct(tuple(shape), "float32") for shape in shapes]
    best = min(
        max(
            sum(shape[first] for shape, first in zip(shapes, order, strict=True)),
            sum(shape[1 - first] for shape, first in zip(shapes, order, strict=True)),
        )
        for order in itertools.product((0, 1), repeat=len(shapes))
    )
    assert 4 * best <= fg.wire_bytes(fg.exchanges.AcpSgd(1), like, LEAF) <= 1.05 * 4 * best


# Turns

LIKE = {"w": jax.ShapeDtypeStruct((12, 10), "float32"), "b": jax.ShapeDtypeStruct((8,), "float32")}


def test_bad_steps_are_no_turns():
    """With every other step bad a count of steps would let the same factor travel forever."""
    tx = fg.compressed_pmean(fg.methods.acp_sgd(rank=2), axis_name=AXIS)
    good = [gradients(LIKE, WORKERS, seed) for seed in range(6)]
    bad = [{**grads, "w": grads["w"].copy()} for grads in good]
    for seed, grads in enumerate(bad):
        grads["w"][seed % WORKERS, seed, 3] = [np.nan, np.inf][seed % 2]
    expected, _ = run(tx, stacked(good))
    alternating = [grads for pair in zip(good, bad, strict=True) for grads in pair]
    found, states = run(tx, stacked(alternating))
    for leaf, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert leaf[::2].tobytes() == wanted.tobytes()
    assert not np.any(np.all(np.isfinite(found["w"][1::2]), axis=(2, 3)))
    for leaf in jax.tree.leaves((states.exchange, states.memory)):
        assert leaf[::2].tobytes() == leaf[1::2].tobytes()
    assert np.all(states.skipped[-1] == 6)


# Values


@pytest.mark.parametrize("kind", [fg.exchanges.AcpSgd, fg.PowerSgd])
def test_steps_without_a_gradient_end_nothing(kind):
    """A factor of zeros would make a basis of first rows, or columns, which have no gradient."""
    r = np.random.default_rng(0)
    whole = (r.normal(size=(16, 2)) @ r.normal(size=(2, 10))).astype(np.float32)
    whole[:3] = 0
    whole[:, :3] = 0
    scales = np.float32([0, 0, 0, 1, 1, 0, 1, 0, 1])[:, None, None, None]
    rows = scales * np.stack([whole] * WORKERS)
    means, _ = run(fg.compressed_pmean(kind(rank=2), axis_name=AXIS), rows)
    np.testing.assert_allclose(means[4:], rows[4:], atol=1e-4)
    assert not np.any(means[:3])
