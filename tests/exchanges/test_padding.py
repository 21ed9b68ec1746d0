"""What fills up a shard changes no scale, and no memory piles it up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parallel import AXIS

import fftgrad as fg

STEPS = 300


def mean_sizes(tx, over, workers, n, gradient, skip=0):
    """The mean |update| of each value over the last steps, of one program."""

    def run(number, noise):
        def step(state, t):
            update, state = tx.update(gradient(t, noise[t, number]), state)
            return state, jnp.abs(update)

        return jax.lax.scan(step, tx.init(jnp.zeros(n)), jnp.arange(STEPS))[1][skip:].mean(0)

    noise = np.random.default_rng(0).standard_normal((STEPS, workers, n)).astype(np.float32)
    return np.asarray(jax.jit(over(run))(noise)).reshape(-1, n)[0]


def on_one_axis(workers):
    def over(run):
        def mapped(noise):
            one = jax.vmap(run, in_axes=(0, None), axis_name=AXIS)
            return one(jnp.arange(workers), noise)

        return mapped

    return over


def on_two_axes(slow, fast):
    def over(run):
        def mapped(noise):
            inner = jax.vmap(run, in_axes=(0, None), axis_name="fast")
            both = jax.vmap(inner, in_axes=(0, None), axis_name="slow")
            return both(jnp.arange(slow * fast).reshape(slow, fast), noise)

        return mapped

    return over


def assert_ends_agree(sizes, shards):
    """The first and the last shard have updates of one size; neither has run away."""
    length = -(-sizes.size // shards)
    first, last = sizes[:length].mean(), sizes[(shards - 1) * length :].mean()
    assert np.all(np.isfinite(sizes))
    assert abs(last / first - 1) < 0.02, (first, last)


def as_it_comes(t, noise):
    del t
    return noise


# None of these has a code for zero.
NO_ZERO = {
    "sign": fg.Sign(),
    "lloyd-max": fg.chain(fg.Hadamard(block=32), fg.codecs.LloydMax(bits=2, block=32)),
}


@pytest.mark.parametrize("n", [1_001, 1_007])
@pytest.mark.parametrize("codec", NO_ZERO.values(), ids=NO_ZERO)
def test_the_last_shard_of_two_stages_is_treated_as_the_first(codec, n):
    tx = fg.compressed_pmean(
        fg.TwoStage(codec, workers=8), fg.ErrorFeedback(decay=0.9), axis_name=AXIS
    )
    assert_ends_agree(mean_sizes(tx, on_one_axis(8), 8, n, as_it_comes), shards=8)


def test_the_last_shard_of_two_stages_does_not_grow_where_nothing_is_forgotten():
    tx = fg.compressed_pmean(fg.TwoStage(fg.Sign(), workers=8), fg.ErrorFeedback(), axis_name=AXIS)
    sizes = mean_sizes(tx, on_one_axis(8), 8, 1_001, as_it_comes)
    assert_ends_agree(sizes, shards=8)


@pytest.mark.parametrize("n", [1_001, 1_008])
def test_the_last_shard_of_one_bit_adam_is_treated_as_the_first(n):
    """Warmed up with ones, so that the second moment is the same for all values."""
    warm_up = 20
    tx = fg.methods.scale_by_one_bit_adam(warm_up, workers=8, axis_name=AXIS)

    def gradient(t, noise):
        return jnp.where(t < warm_up, jnp.ones_like(noise), noise)

    sizes = mean_sizes(tx, on_one_axis(8), 8, n, gradient, skip=2 * warm_up)
    assert_ends_agree(sizes, shards=8)


SLOW = {
    "gather": fg.AllGather(fg.Sign()),
    "two stages": fg.TwoStage(fg.Sign(), workers=2),
}


@pytest.mark.parametrize("n", [1_001, 1_005])
@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_the_last_piece_of_a_hierarchy_is_treated_as_the_first(slow, n):
    tx = fg.compressed_pmean(fg.Hierarchical("fast", 4, slow), axis_name=("slow", "fast"))
    sizes = mean_sizes(tx, on_two_axes(2, 4), 8, n, as_it_comes)
    assert_ends_agree(sizes, shards=4)
    # And within a piece, which two stages cut once more.
    assert_ends_agree(sizes[: -(-n // 4)], shards=2)


@pytest.mark.parametrize("n", [1, 3, 9, 13])
@pytest.mark.parametrize("codec", [fg.Sign(), fg.Identity()], ids=repr)
def test_shards_of_nothing_but_padding_lose_nothing(codec, n):
    """Sum of what was applied + the residuals = sum of the gradients, with shards of padding."""
    tx = optax.chain(
        fg.compressed_pmean(fg.TwoStage(codec, workers=8), fg.ErrorFeedback(), axis_name=AXIS)
    )
    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    rows = np.random.default_rng(n).standard_normal((8, n)).astype(np.float32)
    state = jax.jit(jax.vmap(tx.init))(rows)
    applied = np.zeros(n)
    for _ in range(6):
        mean, state = step(rows, state)
        applied += np.asarray(mean[0], np.float64)
    (inner,) = state
    left = np.asarray(inner.memory.worker_rows.residual, np.float64).mean(0).ravel()
    np.testing.assert_allclose(applied + left, 6 * rows.mean(0), atol=1e-4)
