"""A residual in bfloat16, rounded by chance."""

import jax
import numpy as np
import pytest
from cases import gradients, values
from parallel import AXIS, flat
from stepwise import run, stacked

import fftgrad as fg

WORKERS = 4
LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
TOP_K = fg.AllGather(fg.TopK(fraction=0.1))
NARROW = fg.ErrorFeedback(dtype="bfloat16")


def test_a_value_takes_two_bytes_and_none_is_different_by_default():
    state = jax.eval_shape(NARROW.init, LIKE)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.residual)} == {np.dtype("bfloat16")}
    assert state.rounds.dtype == np.int32
    memory = fg.ErrorFeedback()
    state = jax.eval_shape(memory.init, LIKE)
    assert state.rounds is None
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype("float32")}
    assert memory == fg.ErrorFeedback(dtype="float32")


@pytest.mark.parametrize("memory", [NARROW, fg.ErrorFeedback(beta=0.3, dtype="bfloat16")])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_a_residual_is_kept_on_average(memory, scale):
    """Over many counts the mean is x - sent, within 5 sigma, and with what was put back."""
    x = values((300,)) * np.float32(scale)
    lost = values((300,), seed=1) * np.float32(scale / 50)
    draws = 4000

    @jax.jit
    @jax.vmap
    def kept(count):
        state = memory.init(x)._replace(rounds=count)
        first = memory.update(x, x, x, state)
        return first.residual, memory.restore(lost, first).residual

    first, second = (np.asarray(k, np.float64) for k in kept(np.arange(draws)))
    u = memory.beta
    x, lost = x.astype(np.float64), lost.astype(np.float64)
    for found, wanted in ((first, u * x), (second, u * (x + lost))):
        sigma = found.std(axis=0) / np.sqrt(draws)
        bound = 5 * sigma + 1e-6 * np.abs(wanted)  # what is rounded is rounded to float32 before
        assert np.all(np.abs(found.mean(axis=0) - wanted) <= bound)
    assert np.all(np.abs(first - u * x) <= 1.001 * 2**-7 * np.abs(u * x))


def test_draws_differ_between_counts_positions_leaves_and_workers():
    x = np.full(4096, 1 + 2.0**-9, np.float32)  # a quarter of the way up

    @jax.jit
    def kept(x, count):
        return NARROW.update(x, x, x, NARROW.init(x)._replace(rounds=count)).residual

    rows = [kept(x, np.int32(count)) for count in range(3)]
    rows.append(kept(x * np.float32(1 + 2.0**-16), np.int32(0)))
    up = [np.asarray(row).astype(np.float32) > 1 for row in rows]
    for one in up:
        assert abs(one.mean() - 0.25) <= 5 * np.sqrt(0.25 * 0.75 / 4096)
    for i in range(len(up)):
        for j in range(i):
            assert abs(np.corrcoef(up[i], up[j])[0, 1]) <= 5 / np.sqrt(4096)


@pytest.mark.parametrize("mode", ["shard_map", "shard_map unchecked"])
def test_applied_and_kept_add_up_to_the_gradients_but_for_the_rounding(mode):
    tx = fg.compressed_pmean(TOP_K, NARROW, axis_name=AXIS)
    grads = stacked([gradients(LIKE, WORKERS, seed=n) for n in range(40)])
    applied, states = run(tx, grads, mode=mode)
    memory = jax.tree.map(lambda a: a[-1], states.memory.worker_rows)
    assert memory.rounds.ravel().tolist() == [40] * WORKERS
    gap = flat(applied, 2)[:, 0].sum(0) + flat(memory.residual, 1).mean(0)
    gap -= flat(grads, 2).sum(0).mean(0)
    # Each step rounds by at most 2^-8 on average, and by chance: the errors add up as a walk.
    largest = np.linalg.norm(flat(grads, 1), axis=1).max()
    assert 0 < np.linalg.norm(gap) <= 2**-8 * np.sqrt(40) * 5 * largest
