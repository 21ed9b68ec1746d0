"""A mean that one wrong worker cannot move far: longer vectors are cut to the median length."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import gradients, sample, values
from parallel import MODES, everywhere
from stepwise import once

import fftgrad as fg
from fftgrad.exchanges._all_gather import clipped_mean
from fftgrad.exchanges._parts import Parts

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


@functools.cache
def mean_of(clip, workers, mode="vmap", codec=fg.codecs.Identity()):
    """The program from rows to means."""
    mean = everywhere(mode, lambda x: once(fg.AllGather(codec, clip), x).mean, workers)
    return lambda rows: jax.device_get(mean(rows))


def scaled(workers, **factors):
    """Gradients of the workers, of which some are multiplied: `_1` is the factor of the second."""
    rows = jax.tree.map(np.array, gradients(LIKE, workers))
    for leaf in rows.values():
        for worker, factor in factors.items():
            leaf[int(worker[1:])] *= np.float32(factor)
    return rows


@pytest.mark.parametrize(
    ("clip", "workers", "mode"),
    sample(itertools.product((True, False), (4, 5), MODES), lambda row: {row[:2], row[2]}),
)
def test_it_is_what_it_says(clip, workers, mode):
    grads = scaled(workers, _1=50, _2=0)
    mean = mean_of(clip, workers, mode)(grads)
    for key, rows in grads.items():
        for row in mean[key]:
            np.testing.assert_array_equal(row, mean[key][0])
        np.testing.assert_allclose(mean[key][0], oracle(rows, clip), rtol=2e-5, atol=1e-6)


def test_who_sends_nothing_has_no_vote_on_lengths():
    """Or two workers in three that had no tokens would clip the third one to nothing."""
    grads = scaled(4, _1=0, _2=0, _3=0)
    mean = mean_of(True, 4)(grads)
    for key, rows in grads.items():
        np.testing.assert_allclose(mean[key][0], rows[0] / 4, rtol=1e-5)
    silent = mean_of(True, 4)(jax.tree.map(np.zeros_like, grads))
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(silent))


def test_each_payload_is_decoded_and_none_is_larger():
    codec = fg.chain(fg.TopK(k=20), fg.LogQuantizer(bits=4))
    grads = {"w": scaled(4, _3=1000)["w"]}
    mean = mean_of(True, 4, codec=codec)(grads)
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
    grads = jax.tree.map(lambda g: g * np.float32(scale), scaled(4))
    mean = mean_of(True, 4)(grads)
    for key, rows in grads.items():
        found, expected = np.asarray(mean[key][0], np.float64), oracle(rows)
        np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-4, atol=1e-6)


def test_a_bad_value_is_seen():
    mean = mean_of(True, 4)(scaled(4, _0=np.nan))
    assert not any(np.isfinite(leaf).any() for leaf in jax.tree.leaves(mean))


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, 1, 0, 1), (1, 1, 1, 1)], ids=repr)
def test_what_does_not_count_is_as_nothing_whatever_it_is(counts):
    """Also where it is not zero; and of nobody it is zero, not a division by none."""
    rows = values((4, 30)) * (np.arange(4, dtype=np.float32)[:, None] + 1)
    shares = np.array(counts, np.float32) / max(1, sum(counts))
    codec = Parts.of([(fg.codecs.Identity(), jax.ShapeDtypeStruct((30,), jnp.float32))])
    sent = lambda rows: (fg.codecs.Payload(rows),)  # noqa: E731
    mean = jax.jit(lambda *of: clipped_mean(codec, sent(of[0]), of[1], fg.Step())[0])
    other = np.where(np.array(counts)[:, None], rows, np.float32(77))
    found = [np.asarray(mean(r, shares)) for r in (rows, other)]
    np.testing.assert_array_equal(found[1], found[0])
    left = rows[np.array(counts, bool)]
    wanted = oracle(left) if len(left) else np.zeros(30)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
