"""A mean that one wrong worker cannot move far: longer vectors are cut to the median length."""

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
from fftgrad.exchanges._all_gather import clipped_mean

LIKE = {
    "w": jax.ShapeDtypeStruct((10, 11), jnp.float32),
    "b": jax.ShapeDtypeStruct((7,), "float32"),
}
BY_LEAF = fg.Bucketing("leaf")


def oracle(rows, clip=True):
    """The average of one part, float64[workers, ...]."""
    rows = np.asarray(rows, np.float64)
    lengths = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1))
    middle = np.median(lengths[lengths > 0]) if clip else np.inf
    factors = np.minimum(1, middle / np.where(lengths == 0, 1, lengths))
    return np.tensordot(factors, rows, 1) / len(rows)


def mean_of(clip, workers, mode="vmap", codec=fg.Identity()):  # noqa: B008
    tx = fg.compressed_pmean(fg.AllGather(codec, clip), bucketing=BY_LEAF, axis_name=AXIS)
    state = jax.tree.map(lambda a: jnp.stack([a] * workers), tx.init(LIKE))
    run = everywhere(mode, lambda g, state: tx.update(g, state), workers)
    return lambda grads: run(grads, state)


@pytest.mark.parametrize(
    ("clip", "workers", "mode"),
    sample(itertools.product((True, False), (4, 5), MODES), lambda row: {row[:2], row[2]}),
)
def test_it_is_what_it_says(clip, workers, mode):
    grads = gradients(LIKE, workers)
    grads = jax.tree.map(lambda g: g.at[1].multiply(50).at[2].multiply(0), grads)
    mean, _ = mean_of(clip, workers, mode)(grads)
    for key, rows in grads.items():
        for row in mean[key]:
            np.testing.assert_array_equal(row, mean[key][0])
        np.testing.assert_allclose(mean[key][0], oracle(rows, clip), rtol=2e-5, atol=1e-6)


def test_who_sends_nothing_has_no_vote_on_lengths():
    """Or two workers in three that had no tokens would clip the third one to nothing."""
    grads = jax.tree.map(lambda g: g.at[1:].set(0), gradients(LIKE, 3))
    mean, _ = mean_of(True, 3)(grads)
    for key, rows in grads.items():
        np.testing.assert_allclose(mean[key][0], rows[0] / 3, rtol=1e-5)
    silent = jax.tree.map(jnp.zeros_like, grads)
    mean, _ = mean_of(True, 3)(silent)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(mean))


def test_each_payload_is_decoded_and_none_is_larger():
    codec = fg.chain(fg.TopK(k=20), fg.LogQuantizer(bits=4))
    grads = jax.tree.map(lambda g: g.at[3].multiply(1000), gradients(LIKE, 4))
    mean, _ = mean_of(True, 4, codec=codec)(grads)
    for key, rows in grads.items():
        round_trip = jax.vmap(lambda x: fg.decompress(codec, fg.compress(codec, x), x))
        sent = jax.jit(round_trip)(rows.reshape(len(rows), -1))
        expected = oracle(sent).reshape(rows.shape[1:])
        np.testing.assert_allclose(mean[key][0], expected, rtol=2e-5, atol=1e-6)
    plain, clipped = (fg.AllGather(codec, clip) for clip in (False, True))
    assert fg.wire_bytes(plain, LIKE, BY_LEAF) == fg.wire_bytes(clipped, LIKE, BY_LEAF)
    assert fg.link_bytes(plain, LIKE, 4, BY_LEAF) == fg.link_bytes(clipped, LIKE, 4, BY_LEAF)


@pytest.mark.parametrize("scale", [1e3, 1e30, 1e-30])
def test_lengths_neither_overflow_nor_vanish(scale):
    grads = jax.tree.map(lambda g: g * np.float32(scale), gradients(LIKE, 4))
    mean, _ = mean_of(True, 4)(grads)
    for key, rows in grads.items():
        found, expected = np.asarray(mean[key][0], np.float64), oracle(rows)
        np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [True, False])
def test_a_bad_value_is_seen(clip):
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), gradients(LIKE, 4))
    mean, _ = mean_of(clip, 4)(bad)
    assert not any(np.isfinite(leaf).any() for leaf in jax.tree.leaves(mean))


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, 1, 0, 1), (1, 1, 1, 1)], ids=repr)
def test_what_does_not_count_is_as_nothing_whatever_it_is(counts):
    """Also where it is not zero; and of nobody it is zero, not a division by none."""
    rows = np.asarray(values((4, 30))) * (np.arange(4.0)[:, None] + 1)
    shares = jnp.asarray(counts, jnp.float32) / max(1, sum(counts))
    found = [
        clipped_mean(lambda row: (row,), jnp.asarray(r, jnp.float32), shares)[0]
        for r in (rows, np.where(np.array(counts)[:, None], rows, 77.0))
    ]
    np.testing.assert_array_equal(found[1], found[0])
    left = rows[np.array(counts, bool)]
    wanted = oracle(left) if len(left) else np.zeros(30)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attack", ["long", "against"])
@pytest.mark.parametrize("clip", [True, False])
def test_one_worker_that_is_off_cannot_end_training(clip, attack):
    """A quadratic, whose gradients have noise; one of five workers sends what it should not."""
    workers, target = 5, np.linspace(-1, 1, 30).astype(np.float32)
    tx = optax.chain(
        fg.compressed_pmean(fg.AllGather(fg.Identity(), clip), axis_name=AXIS),
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
    assert (error < 0.1) == clip, error


def test_the_program_sends_no_more_than_for_a_mean():
    codec, mesh = CODECS["top-k 6 bits"], mesh_of(4)
    exchange = fg.AllGather(codec, clip_to_median=True)
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    like = jax.tree.map(lambda a: jnp.ones(a.shape), LIKE)
    specs = fg.state_specs(jax.eval_shape(tx.init, like), AXIS)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)  # the same for all
    update = wrap(tx.update, in_specs=(P(), specs), out_specs=(P(), specs))
    state = fg.init_state(tx, like, mesh, AXIS)
    (found,) = fg.audit(jax.jit(update).lower(like, state).compile())
    assert found.bytes == fg.wire_bytes(exchange, LIKE)
    assert found.bytes == fg.wire_bytes(fg.AllGather(codec), LIKE)
