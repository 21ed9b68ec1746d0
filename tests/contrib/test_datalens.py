"""The threshold of DataLens, and who may know its noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import sample
from parallel import AXIS, everywhere, train_step

import fftgrad as fg


def updates(votes, x, beta, alpha=1.0, dtype="float32", **options):
    tx = fg.contrib.votes.scale_by_datalens(votes, beta, alpha, axis_name=AXIS, **options)
    run = everywhere("vmap", lambda g: tx.update(g, tx.init(g))[0], votes.workers)
    out = run(jnp.asarray(x, dtype))
    assert out.dtype == dtype
    return np.asarray(out.astype(jnp.float32))


def column(up, down, workers=10):
    """The gradients of one coordinate: so many workers vote for it, so many against it."""
    return [1.0] * up + [-1.0] * down + [0.0] * (workers - up - down)


SUMS = {(3, 0): 3, (4, 0): 4, (0, 3): -3, (0, 4): -4, (5, 2): 3, (6, 1): 5, (2, 2): 0, (0, 0): 0}
X = np.stack([column(*pair) for pair in SUMS], axis=1)
F = np.array(list(SUMS.values()))


# The threshold of 0.3 · 10 votes is 3 of them, which is not above it, though 0.3 is no binary
# fraction, and the leaves have few bits.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.2999, 0.3, 0.31, 0.5, 1.0, 2.0])
def test_above_below_between_and_at_the_threshold(beta, dtype):
    votes = fg.contrib.votes.TopVotes(workers=10, fraction=1.0)
    bound = round(10 * beta, 6)
    wanted = 0.5 * ((bound < F).astype(float) - (-bound > F))
    for row in updates(votes, X, beta, alpha=0.5, dtype=dtype):
        np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("workers", sample(range(1, 40), lambda w: {w % 10, w > 20}))
def test_a_share_that_the_votes_have_exactly_is_not_above_it(workers):
    x = np.tril(np.ones((workers, workers)))  # j + 1 votes less than there are, for each j
    votes = fg.contrib.votes.TopVotes(workers=workers, fraction=1.0)
    for count in {1, workers // 3, workers // 2, workers - 1, workers} - {0}:
        got = updates(votes, x, beta=count / workers)[0]
        np.testing.assert_array_equal(got, np.arange(workers, 0, -1) > count)


def test_the_key_decides_the_noise():
    votes = fg.contrib.votes.TopVotes(workers=4, k=1, sigma=5.0)
    zeros = np.zeros((4, 1000), np.float32)
    one, same, other = (updates(votes, zeros, 0.1, key=key) for key in (1, jax.random.key(1), 2))
    np.testing.assert_array_equal(one, same)
    assert np.all(one == one[0])
    assert abs(np.mean(one[0] * other[0])) <= 5 / np.sqrt(1000)
    assert np.mean(one[0] != 0) > 0.8


def test_a_quadratic_is_found_with_noise_on_the_votes():
    """Ten workers agree on most signs: what is learned survives noise of a few votes."""
    target = np.linspace(-1, 1, 64).astype(np.float32)
    votes = fg.contrib.votes.TopVotes(workers=8, fraction=0.25, sigma=2.0)
    tx = optax.chain(
        fg.contrib.votes.scale_by_datalens(votes, beta=0.5, key=3, axis_name=AXIS), optax.sgd(0.02)
    )
    like = {"w": jax.ShapeDtypeStruct((64,), "float32")}
    init, update = train_step(tx, 8, like=like)
    w, rng = jnp.zeros(64), np.random.default_rng(0)
    state = init({"w": w})
    for _ in range(400):
        noise = 0.1 * rng.normal(size=(8, 64)).astype(np.float32)
        change, state = update({"w": (w - target)[None] + noise}, state)
        w = w + change["w"]
    assert float(np.mean((w - target) ** 2)) < 0.1 * float(np.mean(target**2))
    assert fg.metrics(state)["step"] == 400


def test_noise_without_a_secret_key_is_refused():
    with pytest.raises(ValueError, match=r"os\.urandom"):
        fg.contrib.votes.scale_by_datalens(fg.contrib.votes.TopVotes(workers=4, k=3, sigma=1.0))
    with pytest.raises(TypeError, match=r"use TopVotes\("):
        fg.contrib.votes.scale_by_datalens(fg.AllReduce())
