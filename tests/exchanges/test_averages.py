"""Averages that a worker which is off cannot move."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, gradients, sample, values
from jax.sharding import PartitionSpec as P
from parallel import AXIS, MODES, everywhere, mesh_of

import fftgrad as fg

LIKE = {
    "w": jax.ShapeDtypeStruct((10, 11), jnp.float32),
    "b": jax.ShapeDtypeStruct((7,), "float32"),
}
BY_LEAF = fg.Layout("leaf")
AVERAGES = {
    "clipped": fg.exchanges.MedianNormClip(),
    "trimmed": fg.exchanges.TrimmedMean(trim=1),
    "mean": None,
}


def oracle(name, rows):
    """The average of one part, float64[workers, ...]."""
    rows = np.asarray(rows, np.float64)
    if name == "trimmed":
        return np.sort(rows, axis=0)[1:-1].mean(0)
    lengths = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1))
    middle = np.median(lengths[lengths > 0]) if name == "clipped" else np.inf
    factors = np.minimum(1, middle / np.where(lengths == 0, 1, lengths))
    return np.tensordot(factors, rows, 1) / len(rows)


def mean_of(average, workers, mode="vmap", codec=fg.Identity(), **options):  # noqa: B008
    tx = fg.compressed_pmean(
        fg.AllGather(codec, average), layout=BY_LEAF, axis_name=AXIS, **options
    )
    state = jax.tree.map(lambda a: jnp.stack([a] * workers), tx.init(LIKE))
    run = everywhere(mode, lambda g, state: tx.update(g, state), workers)
    return lambda grads: run(grads, state)


@pytest.mark.parametrize(
    ("name", "workers", "mode"),
    sample(itertools.product(AVERAGES, (4, 5), MODES), lambda row: {row[:2], row[2]}),
)
def test_they_are_what_they_say(name, workers, mode):
    grads = gradients(LIKE, workers)
    grads = jax.tree.map(lambda g: g.at[1].multiply(50).at[2].multiply(0), grads)
    mean, _ = mean_of(AVERAGES[name], workers, mode)(grads)
    for key, rows in grads.items():
        for row in mean[key]:
            np.testing.assert_array_equal(row, mean[key][0])
        np.testing.assert_allclose(mean[key][0], oracle(name, rows), rtol=2e-5, atol=1e-6)


def test_who_sends_nothing_has_no_vote_on_lengths():
    """Or two workers in three that had no tokens would clip the third one to nothing."""
    grads = jax.tree.map(lambda g: g.at[1:].set(0), gradients(LIKE, 3))
    mean, _ = mean_of(fg.exchanges.MedianNormClip(), 3)(grads)
    for key, rows in grads.items():
        np.testing.assert_allclose(mean[key][0], rows[0] / 3, rtol=1e-5)
    silent = jax.tree.map(jnp.zeros_like, grads)
    mean, _ = mean_of(fg.exchanges.MedianNormClip(), 3)(silent)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(mean))


def test_each_payload_is_decoded_and_none_is_larger():
    codec = fg.chain(fg.TopK(k=20), fg.LogLevels(bits=4))
    grads = jax.tree.map(lambda g: g.at[3].multiply(1000), gradients(LIKE, 4))
    mean, _ = mean_of(fg.exchanges.MedianNormClip(), 4, codec=codec)(grads)
    for key, rows in grads.items():
        round_trip = jax.vmap(lambda x: fg.decompress(codec, fg.compress(codec, x), x))
        sent = jax.jit(round_trip)(rows.reshape(len(rows), -1))
        expected = oracle("clipped", sent).reshape(rows.shape[1:])
        np.testing.assert_allclose(mean[key][0], expected, rtol=2e-5, atol=1e-6)
    plain, clipped = (
        fg.AllGather(codec, average) for average in (None, fg.exchanges.MedianNormClip())
    )
    assert fg.wire_bytes(plain, LIKE, BY_LEAF) == fg.wire_bytes(clipped, LIKE, BY_LEAF)
    assert fg.link_bytes(plain, LIKE, 4, BY_LEAF) == fg.link_bytes(clipped, LIKE, 4, BY_LEAF)


@pytest.mark.parametrize("scale", [1e3, 1e30, 1e-30])
def test_lengths_neither_overflow_nor_vanish(scale):
    grads = jax.tree.map(lambda g: g * np.float32(scale), gradients(LIKE, 4))
    mean, _ = mean_of(fg.exchanges.MedianNormClip(), 4)(grads)
    for key, rows in grads.items():
        found, expected = np.asarray(mean[key][0], np.float64), oracle("clipped", rows)
        np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", AVERAGES)
def test_a_bad_value_is_seen(name):
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), gradients(LIKE, 4))
    mean, _ = mean_of(AVERAGES[name], 4)(bad)
    assert not any(np.isfinite(leaf).any() for leaf in jax.tree.leaves(mean))


@pytest.mark.parametrize(
    "average", [fg.exchanges.MedianNormClip(), fg.exchanges.TrimmedMean()], ids=repr
)
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, 1, 0, 1), (1, 1, 1, 1)], ids=repr)
def test_what_does_not_count_is_as_nothing_whatever_it_is(average, counts):
    """Also where it is not zero; and of nobody it is zero, not a division by none."""
    rows = np.asarray(values((4, 30))) * (np.arange(4.0)[:, None] + 1)
    found = [
        average.of(lambda row: (row,), jnp.asarray(r, jnp.float32), jnp.asarray(counts, bool))[0]
        for r in (rows, np.where(np.array(counts)[:, None], rows, 77.0))
    ]
    np.testing.assert_array_equal(found[1], found[0])
    left = rows[np.array(counts, bool)]
    name = "trimmed" if isinstance(average, fg.exchanges.TrimmedMean) else "clipped"
    wanted = oracle(name, left) if len(left) else np.zeros(30)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)


def test_one_at_either_end_is_trimmed_unless_told_otherwise():
    assert fg.exchanges.TrimmedMean() == fg.exchanges.TrimmedMean(trim=1)


@pytest.mark.parametrize("workers", [4, 3])
def test_two_that_count_are_too_few_to_trim(workers):
    rows, counts = jnp.asarray(values((workers, 30))), jnp.arange(workers) >= workers - 2
    (mean,) = fg.exchanges.TrimmedMean(trim=1).of(lambda row: (row,), rows, counts)
    np.testing.assert_allclose(mean, np.mean(rows[-2:], axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attack", ["long", "against"])
@pytest.mark.parametrize(("name", "holds"), [("mean", False), ("clipped", True), ("trimmed", True)])
def test_one_worker_that_is_off_cannot_end_training(name, holds, attack):
    """A quadratic, whose gradients have noise; one of five workers sends what it should not."""
    workers, target = 5, np.linspace(-1, 1, 30).astype(np.float32)
    tx = optax.chain(
        fg.compressed_pmean(fg.AllGather(fg.Identity(), AVERAGES[name]), axis_name=AXIS),
        optax.sgd(0.1),
    )

    def step(noise, state, params):
        gradient = params - target + noise
        off = 300 * noise if attack == "long" else -300 * gradient
        gradient = jnp.where(jax.lax.axis_index(AXIS) == 2, off, gradient)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(params, updates), state

    run = everywhere("vmap", step, workers)
    params = jnp.zeros((workers, 30))
    state = jax.tree.map(lambda a: jnp.stack([a] * workers), tx.init(params[0]))
    rng = np.random.default_rng(0)
    for _ in range(200):
        noise = 0.1 * rng.standard_normal((workers, 30)).astype(np.float32)
        params, state = run(noise, state, params)
    error = np.linalg.norm(params[0] - target) / np.linalg.norm(target)
    assert (error < 0.1) == holds, error


def test_the_program_sends_no_more_than_for_a_mean():
    codec, mesh = CODECS["top-k 6 bits"], mesh_of(4)
    exchange = fg.AllGather(codec, fg.exchanges.MedianNormClip())
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    like = jax.tree.map(lambda a: jnp.ones(a.shape), LIKE)
    specs = fg.state_specs(jax.eval_shape(tx.init, like), AXIS)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)  # the same for all
    update = wrap(tx.update, in_specs=(P(), specs), out_specs=(P(), specs))
    state = fg.init_state(tx, like, mesh, AXIS)
    (found,) = fg.audit(jax.jit(update).lower(like, state).compile())
    assert found.bytes == fg.wire_bytes(exchange, LIKE)
    assert found.bytes == fg.wire_bytes(fg.AllGather(codec), LIKE)


def test_mistakes():
    with pytest.raises(TypeError, match=r"AllGather\(average\): must be an average, got 'median'"):
        fg.AllGather(fg.Sign(), "median")
    with pytest.raises(TypeError, match="which a call makes"):
        fg.AllGather(fg.Sign(), fg.exchanges.MedianNormClip)
    with pytest.raises(ValueError, match=r"TrimmedMean\(trim\): must be at least 1"):
        fg.exchanges.TrimmedMean(trim=0)
    with pytest.raises(ValueError, match=r"must leave some of 4 workers, got 2.*MedianNormClip"):
        mean_of(fg.exchanges.TrimmedMean(trim=2), 4)(gradients(LIKE, 4))
