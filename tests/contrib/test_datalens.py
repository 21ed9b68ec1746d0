"""The threshold of DataLens, and who may know its noise."""

import jax
import numpy as np
import pytest
from parallel import AXIS, everywhere

import fftgrad as fg


def updates(votes, x, beta, alpha=1.0, dtype="float32", **options):
    tx = fg.contrib.votes.scale_by_datalens(votes, beta, alpha, axis_name=AXIS, **options)
    run = everywhere("vmap", lambda g: tx.update(g, tx.init(g))[0], votes.workers)
    out = run(np.asarray(x).astype(dtype))
    assert out.dtype == dtype
    return np.asarray(out).astype(np.float32)


def column(up, down, workers=10):
    """The gradients of one coordinate: so many workers vote for it, so many against it."""
    return [1.0] * up + [-1.0] * down + [0.0] * (workers - up - down)


SUMS = {(3, 0): 3, (4, 0): 4, (0, 3): -3, (0, 4): -4, (5, 2): 3, (6, 1): 5, (2, 2): 0, (0, 0): 0}
X = np.stack([column(*pair) for pair in SUMS], axis=1)
F = np.array(list(SUMS.values()))


# The threshold of 0.3 · 10 votes is 3 of them, which is not above it, though 0.3 is no binary
# fraction, and the leaves have few bits.
@pytest.mark.parametrize(
    ("beta", "dtype"),
    [*((beta, "float32") for beta in (0.0, 0.2999, 0.3, 0.31, 2.0)), (0.3, "bfloat16"),
     (0.3, "float16")],
)  # fmt: skip
def test_above_below_between_and_at_the_threshold(beta, dtype):
    votes = fg.contrib.votes.TopVotes(workers=10, fraction=1.0)
    bound = round(10 * beta, 6)
    wanted = 0.5 * ((bound < F).astype(float) - (-bound > F))
    for row in updates(votes, X, beta, alpha=0.5, dtype=dtype):
        np.testing.assert_array_equal(row, wanted)


def test_the_key_decides_the_noise():
    votes = fg.contrib.votes.TopVotes(workers=4, k=1, sigma=5.0)
    zeros = np.zeros((4, 1000), np.float32)
    one, same, other = (updates(votes, zeros, 0.1, key=key) for key in (1, jax.random.key(1), 2))
    np.testing.assert_array_equal(one, same)
    assert np.all(one == one[0])
    assert abs(np.mean(one[0] * other[0])) <= 5 / np.sqrt(1000)
    assert np.mean(one[0] != 0) > 0.8


def test_noise_without_a_secret_key_is_refused():
    with pytest.raises(ValueError, match=r"os\.urandom"):
        fg.contrib.votes.scale_by_datalens(fg.contrib.votes.TopVotes(workers=4, k=3, sigma=1.0))
    with pytest.raises(TypeError, match=r"use TopVotes\("):
        fg.contrib.votes.scale_by_datalens(fg.AllReduce())
