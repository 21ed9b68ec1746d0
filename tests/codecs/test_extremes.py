"""Values at the ends of float32, values that are all equal, and codecs in every combination."""

import functools

import jax
import numpy as np
import pytest
import reference
from cases import CODECS, values
from messages import compress, decompress
from parallel import AXIS, everywhere
from stepwise import STEP, once, run

import fftgrad as fg

WORKERS = 4


@functools.partial(jax.jit, static_argnums=0)
def both_ways(codec, x):
    """What a codec makes of an array."""
    return fg.decompress(codec, fg.compress(codec, x, step=STEP), x, step=STEP)


def round_trip(codec, x):
    return np.asarray(both_ways(codec, x))


# Equal values


@pytest.fixture
def as_users_compile_it():
    """With the optimizations that the suite goes without: they change how values are rounded."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


EQUAL = [0.1, 1 / 3, -3.7, 7.0, 1e-20, 3e20]
SIZES = [2, 64, 100, 1_000, 5_000]


def integer_sum(clip=None):
    exchange = fg.exchanges.QuantizedAllReduce(WORKERS, clip=clip)
    return everywhere("vmap", lambda x: once(exchange, x).mean, WORKERS)


@pytest.mark.usefixtures("as_users_compile_it")
@pytest.mark.parametrize("n", SIZES)
def test_equal_values_survive_ternary_and_an_integer_sum(n):
    mean, ternary = integer_sum(), jax.jit(lambda x: both_ways.__wrapped__(fg.codecs.Ternary(), x))
    for value in EQUAL:
        rows = np.full((WORKERS, n), value, np.float32)
        np.testing.assert_allclose(mean(rows), rows, rtol=1e-5)
        np.testing.assert_allclose(ternary(rows[0]), rows[0], rtol=1e-5)


# The ends of the range

QUANTIZERS = [CODECS[name] for name in ("levels", "levels max", "ternary clipped", "range float")]
QUANTIZERS += [fg.codecs.Ternary(clip=None), fg.codecs.LloydMax(bits=2, block=64), fg.Sign()]
WITH_SCALES = [CODECS["bin means"], CODECS["ternary clipped"], fg.LogQuantizer(bits=4)]
WITH_SCALES += [fg.codecs.LloydMax(bits=2, block=64), fg.UniformQuantizer(bits=4, bucket=64)]


def spiky():
    """One value of 1.5 among small ones: times 2^127 both it and the length are below 2^128."""
    x = 0.05 * values((64,)) / np.abs(values((64,))).max()
    x[37] = -1.5
    return x.astype(np.float32)


def same_at_any_scale(run, x):
    expected = np.asarray(run(x))
    assert np.any(expected)
    for scale in np.ldexp(np.float32(1), [-100, 100, 126, 127]):
        found = np.asarray(run(scale * x)) / scale
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("codec", QUANTIZERS, ids=repr)
def test_a_quantizer_does_the_same_at_any_scale(codec):
    same_at_any_scale(functools.partial(both_ways, codec), spiky())


@pytest.mark.parametrize("clip", [None, 2.5])
def test_an_integer_sum_does_the_same_at_any_scale(clip):
    rows = np.stack([np.roll(spiky(), i // 2) for i in range(WORKERS)])
    same_at_any_scale(integer_sum(clip), rows)


@pytest.mark.parametrize(("bits", "mantissa"), [(10, 1), (12, 3), (6, 2), (16, 7)])
def test_any_codes_decode_to_finite_numbers(bits, mantissa):
    """What arrives may be anything; with few mantissa bits there are more codes than numbers."""
    codec = fg.RangeFloat(bits=bits, mantissa=mantissa)
    for largest in (1e-30, 1.0, 3e38):
        x = np.full(5_000, largest, np.float32)
        payload = compress(codec, x)
        words = np.random.default_rng(0).integers(0, 2**32, payload.main.shape, np.uint32)
        garbage = payload._replace(main=words)
        assert np.all(np.isfinite(decompress(codec, garbage, x)))


@pytest.mark.parametrize("codec", WITH_SCALES, ids=repr)
def test_a_scale_that_is_none_decodes_to_no_number(codec):
    """What arrives may be anything; the last of the numbers beside the codes counts for all."""
    payload = compress(codec, spiky(), step=STEP)
    for bad in (np.nan, np.inf):
        side = np.array(payload.side)
        side[-1] = bad
        spoiled = payload._replace(side=side)
        assert np.all(np.isnan(decompress(codec, spoiled, spiky(), step=STEP)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cast_keeps_signs_and_sizes(name):
    x = np.array([1.0, -1.0, 0.0, 2.0, -2.0, 1.5], np.float32)
    np.testing.assert_allclose(round_trip(fg.Cast(name), x), x, rtol=0.25)


BOUNDED = {
    "heavy tail": values((5000,)),
    "equal": np.full(5000, 3.0, np.float32),
    "zero": np.zeros(5000, np.float32),
    "two values": np.where(np.arange(5000) % 3, 1.0, -2.0).astype(np.float32),
    "one-hot": np.eye(1, 5000, 137, dtype=np.float32)[0],
    "dynamic range": np.exp(np.random.default_rng(0).normal(0, 9, 5000)).astype(np.float32),
}


@functools.partial(jax.jit, static_argnums=0)
def threshold(codec, x):
    return codec.compress(x, codec.init(x), fg.Step()).state.threshold


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.4])
def test_a_threshold_is_that_of_halving_the_bounds(fraction):
    for name, x in BOUNDED.items():
        codec, k = fg.Threshold(fraction=fraction), reference.kept(fraction, x.size)
        size = np.abs(x)
        low, high = np.float32(np.mean(size, dtype=np.float64)), size.max()
        low = low if np.sum(size > low) >= k else np.float32(0)
        for halvings in range(20):
            if k <= np.sum(size > low) <= 2 * k:
                break
            bits = np.array([low, high], np.float32).view(np.int32)
            by_bits = (bits[0] + (bits[1] - bits[0]) // 2).view(np.float32)
            middle = np.float32(0.5) * low + np.float32(0.5) * high if halvings < 8 else by_bits
            low, high = (middle, high) if np.sum(size > middle) >= k else (low, middle)
        np.testing.assert_allclose(threshold(codec, x), low, rtol=1e-5, err_msg=name)


def test_an_exact_threshold_sends_the_largest_and_no_zeros():
    codec = fg.Threshold(fraction=0.1, search="exact")
    x = values((400,))
    y = round_trip(codec, x)
    largest = np.sort(np.argsort(-np.abs(x))[:40])
    assert set(largest) <= set(np.flatnonzero(y))
    np.testing.assert_array_equal(y[largest], x[largest])
    few = np.where(np.arange(400) % 100 == 7, x, 0).astype(np.float32)
    np.testing.assert_array_equal(round_trip(codec, few), few)


# State of a stage, in two stages


def test_two_stages_of_one_sided_values_send_the_negative_ones_too():
    codec = fg.chain(fg.codecs.AlternatingSign(), fg.TopK(k=4))
    tx = fg.compressed_pmean(fg.TwoStage(codec, workers=2), fg.ErrorFeedback(), axis_name=AXIS)
    row = np.array([1.0, -1.0, 2.0, -2.0], np.float32)
    means, states = run(tx, np.stack([[row, row]] * 6))
    applied = means[:, 0].sum(0)
    assert np.all(applied * row > 0)
    left = states.memory.worker_rows.residual[-1].mean(0).ravel()
    np.testing.assert_allclose(applied + left, 6 * row, atol=1e-5)


# Overflow

TOO_LARGE = {
    "gather": fg.AllGather(fg.Cast("float16")),
    "gather, a fixed range": fg.AllGather(fg.RangeFloat(8, limits=(-1.0, 1.0))),
    "gather, last of a chain": fg.AllGather(fg.chain(fg.TopK(k=12), fg.Cast("float16"))),
    "gather, first of a chain": fg.AllGather(fg.chain(fg.Fft(half=True), fg.TopK(k=4))),
    "gather, second of three": fg.AllGather(
        fg.chain(fg.Fft(half=True), fg.TopK(k=4), fg.RangeFloat(bits=8))
    ),
    "sum": fg.AllReduce(fg.Fft(half=True)),
    "sum of a chain": fg.AllReduce(fg.chain(fg.Fft(half=True), fg.codecs.RandomK(k=4))),
    "leader": fg.exchanges.LeaderTopK(fg.chain(fg.Fft(half=True), fg.TopK(k=4))),
    "two stages": fg.TwoStage(fg.Cast("float16"), workers=WORKERS),
    "eigenbasis": fg.Eigenbasis(fg.AllGather(fg.Cast("float16"))),
    "piecewise": fg.Scheduled({0: fg.AllReduce(fg.Fft(half=True))}),
    "ladder": fg.exchanges.Ladder((fg.AllReduce(fg.Fft(half=True)),)),
}


@pytest.mark.parametrize("exchange", TOO_LARGE.values(), ids=TOO_LARGE)
def test_every_exchange_counts_what_overflows_on_all_workers(exchange):
    rows = np.zeros((WORKERS, 12), np.float32)
    rows[1, :3], rows[3, 0] = 2e5, -5e5
    overflow = everywhere("vmap", lambda x: once(exchange, x).stats.overflow, WORKERS)(rows)
    assert np.broadcast_to(overflow, WORKERS).tolist() == [4] * WORKERS
