"""Votes and their noise: the NumPy oracle, the distribution, and what one worker can change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import values
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, with_model

import fftgrad as fg

N = 200
FEW_VOTES = fg.contrib.votes.TopVotes(workers=4, k=7)
MANY_VOTES = fg.contrib.votes.TopVotes(workers=4, k=120)


def one_step(exchange, number=0):
    def run(x):
        # The randomness of `compressed_pmean`: one key, and the worker's own.
        step = fg.Step.of(7, number)
        step = step._replace(local=jax.random.fold_in(step.local, jax.lax.axis_index(AXIS)))
        out = exchange.mean(x, exchange.init(x), fg.exchanges.Comm(AXIS, step))
        return out.mean, jax.tree.map(jnp.subtract, x, out.error)

    return run


@functools.cache
def everywhere_of(exchange, number, mode, workers):
    return everywhere(mode, one_step(exchange, number), workers)


def run(exchange, x, number=0, mode="vmap"):
    mean, sent = everywhere_of(exchange, number, mode, len(x))(np.asarray(x, np.float32))
    return np.asarray(mean), np.asarray(sent)


def rows(workers=4, n=N, seed=0):
    return values((workers, n), seed)


# Votes


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
@pytest.mark.parametrize("exchange", [FEW_VOTES, MANY_VOTES], ids=repr)
def test_the_mean_of_votes_is_the_numpy_oracle_bit_for_bit(exchange, mode):
    x = rows()
    x[1, :150] = 0  # fewer than 120 differ from zero
    mean, sent = run(exchange, x, mode=mode)
    votes = np.stack([reference.votes(row, exchange.k) for row in x])
    np.testing.assert_array_equal(sent, votes)
    np.testing.assert_array_equal(mean, np.tile(votes.sum(0) / 4, (4, 1)).astype(np.float32))


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_votes_by_chance_have_the_papers_chance(clip):
    """P(1) = 1/2 + x / 2b; each of 2,000 copies of five values within 5 sigma of it."""
    copies = 2000
    one = np.array([1.0, -0.4, 0.25, -0.1, 0.02])
    x = np.tile(one, copies)[None].astype(np.float32)
    _, sent = run(fg.contrib.votes.TopVotes(workers=1, fraction=1.0, clip=clip), x)
    up = (sent.reshape(copies, 5) == 1).mean(0)
    bound = min(clip, 1.0)
    chance = 0.5 + np.clip(one, -bound, bound) / (2 * bound)
    assert np.all(sent != 0)
    assert np.all(np.abs(up - chance) <= 5 * np.sqrt(chance * (1 - chance) / copies))


# Noise


MANY = 20_000


def is_normal(draws, sigma):
    """Mean, variance, and the shares within one, two and three sigma, within 5 of their own."""
    n = draws.size
    assert abs(draws.mean()) <= 5 * sigma / np.sqrt(n)
    assert abs(draws.var() / sigma**2 - 1) <= 5 * np.sqrt(2 / n)
    for times, share in ((1, 0.682689), (2, 0.954500), (3, 0.997300)):
        found = np.mean(np.abs(draws) <= times * sigma)
        assert abs(found - share) <= 5 * np.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
def test_the_noise_has_the_stated_variance_and_is_another_in_each_step_and_part(mode):
    exchange = fg.contrib.votes.TopVotes(workers=4, k=3, sigma=2.5)
    mean, sent = run(exchange, np.zeros((4, MANY)), mode=mode)
    assert np.all(sent == sent[0])
    assert np.all(mean == mean[0])
    np.testing.assert_allclose(sent.sum(0), 4 * mean[0], atol=1e-4)
    tx = fg.compressed_pmean(exchange, axis_name=AXIS, bucketing=fg.Bucketing("leaf"))
    update = everywhere("vmap", lambda g, s: tx.update(g, s), 4)
    zeros = dict.fromkeys("ab", np.zeros((4, MANY), np.float32))
    one, state = update(zeros, jax.jit(jax.vmap(tx.init))(zeros))
    other, _ = update(zeros, state)
    draws = [mean[0], *(np.asarray(tree[leaf])[0] for tree in (one, other) for leaf in "ab")]
    for i, a in enumerate(draws):
        is_normal(4 * a.astype(np.float64), 2.5)
        for b in draws[:i]:
            correlation = abs(np.mean(a * b) / np.sqrt(np.mean(a**2) * np.mean(b**2)))
            assert correlation <= 5 / np.sqrt(MANY)


@pytest.mark.parametrize("sigma", [0.3, 50.0, 5000.0])
def test_noise_and_votes_are_on_one_grid_and_add_up_exactly(sigma):
    x = rows()
    for quiet in (FEW_VOTES, MANY_VOTES):
        exchange = fg.contrib.votes.TopVotes(4, k=quiet.k, sigma=sigma)
        silent, noisy = (4 * run(exchange, a)[0][0].astype(np.float64) for a in (0 * x, x))
        np.testing.assert_array_equal(noisy - silent, 4 * run(quiet, x)[0][0])
        grid = min(1.0, 2.0 ** (np.floor(np.log2(sigma)) - 10))
        assert np.all(silent % grid == 0)
        assert np.any(silent % (2 * grid) != 0)


def test_equal_sums_have_equal_bits_whatever_was_voted():
    """For three workers too, whose third is no float."""
    exchange = fg.contrib.votes.TopVotes(workers=3, fraction=1.0, sigma=2.0)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (3, 5000)).astype(np.float32)
    mean, _ = run(exchange, signs)
    by_sum = {}
    for value in mean[0]:
        by_sum.setdefault(round(float(value) * 3 * 1024), set()).add(value.tobytes())
    assert len(by_sum) > 1000
    assert {len(bits) for bits in by_sum.values()} == {1}


@pytest.mark.parametrize("check_vma", [True, False])
def test_noise_on_shards_of_a_model_is_refused(check_vma):
    """Two shards would have the same noise, and their difference would tell the votes."""
    mesh = with_model()
    spec, x = P(AXIS, "model"), np.ones((4, 8))
    quiet, noisy = (
        jax.shard_map(
            one_step(fg.contrib.votes.TopVotes(workers=4, k=2, sigma=sigma)),
            mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma,
        )
        for sigma in (0.0, 2.0)
    )  # fmt: skip
    jax.eval_shape(quiet, x)
    with pytest.raises(ValueError, match="vote on whole gradients"):
        jax.eval_shape(noisy, x)


def test_mistakes_are_answered_with_the_remedy():
    with pytest.raises(ValueError, match="use workers=4"):
        run(fg.contrib.votes.TopVotes(3, k=3), rows())
    noisy = fg.contrib.votes.TopVotes(workers=4, k=3, sigma=1.0)
    keyless = fg.exchanges.Comm(AXIS)
    with pytest.raises(ValueError, match=r"pass Comm\(axis_name"):
        everywhere("vmap", lambda x: noisy.mean(x, noisy.init(x), keyless).mean, 4)(rows())
