"""What fills up a shard changes no scale, and no memory piles it up."""

import jax
import numpy as np
import pytest
from parallel import AXIS
from stepwise import run

import fftgrad as fg

STEPS = 300


def noise(n):
    """Gradients of eight workers."""
    return np.random.default_rng(0).standard_normal((STEPS, 8, n)).astype(np.float32)


def mean_sizes(tx, rows):
    """The mean |update| of each value."""
    return np.abs(run(tx, rows)[0][:, 0]).mean(0)


def assert_ends_agree(sizes, shards):
    """The first and the last shard have updates of one size; neither has run away."""
    length = -(-sizes.size // shards)
    first, last = sizes[:length].mean(), sizes[(shards - 1) * length :].mean()
    assert np.all(np.isfinite(sizes))
    assert abs(last / first - 1) < 0.02, (first, last)


# None of these has a code for zero.
NO_ZERO = {
    "sign": fg.Sign(),
    "lloyd-max": fg.chain(fg.Hadamard(block=32), fg.codecs.LloydMax(bits=2, block=32)),
}


@pytest.mark.parametrize("n", [1_001, 1_007])
@pytest.mark.parametrize(
    ("codec", "decay"),
    [*((codec, 0.9) for codec in NO_ZERO.values()), (fg.Sign(), 1.0)],
    ids=[*NO_ZERO, "nothing is forgotten"],
)
def test_the_last_shard_of_two_stages_is_treated_as_the_first(codec, decay, n):
    memory = fg.ErrorFeedback(decay=decay)
    tx = fg.compressed_pmean(fg.TwoStage(codec, workers=8), memory, axis_name=AXIS)
    assert_ends_agree(mean_sizes(tx, noise(n)), shards=8)


SLOW = {"gather": fg.AllGather(fg.Sign()), "two stages": fg.TwoStage(fg.Sign(), workers=2)}


@pytest.mark.parametrize("n", [1_001, 1_005])
@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_the_last_piece_of_a_hierarchy_is_treated_as_the_first(slow, n):
    tx = fg.compressed_pmean(fg.Hierarchical("fast", 4, slow), axis_name=("slow", "fast"))

    def worker(rows):
        step = lambda state, row: tx.update(row, state)[::-1]  # noqa: E731
        return jax.lax.scan(step, tx.init(rows[0]), rows)[1]

    both = jax.vmap(jax.vmap(worker, axis_name="fast"), axis_name="slow")
    updates = jax.jit(both)(noise(n).swapaxes(0, 1).reshape(2, 4, STEPS, n))
    sizes = np.abs(updates[0, 0]).mean(0)
    assert_ends_agree(sizes, shards=4)
    # And within a piece, which two stages cut once more.
    assert_ends_agree(sizes[: -(-n // 4)], shards=2)


@pytest.mark.parametrize("n", [1, 3, 9, 13])
@pytest.mark.parametrize("codec", [fg.Sign(), fg.codecs.Identity()], ids=repr)
def test_shards_of_nothing_but_padding_lose_nothing(codec, n):
    """Sum of what was applied + the residuals = sum of the gradients, with shards of padding."""
    tx = fg.compressed_pmean(fg.TwoStage(codec, workers=8), fg.ErrorFeedback(), axis_name=AXIS)
    rows = np.random.default_rng(n).standard_normal((8, n)).astype(np.float32)
    means, states = run(tx, np.stack([rows] * 6))
    left = states.memory.worker_rows.residual[-1].mean(0).ravel()
    np.testing.assert_allclose(means[:, 0].sum(0) + left, 6 * rows.mean(0), atol=1e-4)
