"""The counter hash: uniform, and independent over positions, keys, steps and workers."""

import jax
import numpy as np
import pytest

from fftgrad.ops import _random

N = 1 << 18


@jax.jit
def stream(seed: int, step: int, worker: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), worker)
    return _random.keyed_bits(key, N)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Mean zero, variance one."""
    return (bits / 2**32 - 0.5) * np.sqrt(12)


STREAMS = {
    "key": np.asarray(stream(0, 0, 0)),
    "other key": np.asarray(stream(1, 0, 0)),
    "step": np.asarray(stream(0, 1, 0)),
    "worker": np.asarray(stream(0, 0, 1)),
}


def chi_square(counts):
    return np.sum((counts - N / 256) ** 2) / (N / 256)


@pytest.mark.parametrize("bits", STREAMS.values(), ids=STREAMS)
def test_every_bit_byte_and_pair_of_neighbors_is_fair(bits):
    ones = np.array([np.count_nonzero(bits >> bit & 1) for bit in range(32)])
    assert np.all(np.abs(ones - N / 2) <= 5 * np.sqrt(N) / 2)
    for shift in (0, 8, 16, 24):
        counts = np.bincount(bits >> shift & 255, minlength=256)
        assert abs(chi_square(counts) - 255) <= 5 * np.sqrt(2 * 255)
    for shift in (0, 11, 20, 28):
        nibble = bits >> shift & 15
        counts = np.bincount(16 * nibble[:-1] + nibble[1:], minlength=256)
        assert abs(chi_square(counts) - 255) <= 5 * np.sqrt(2 * 255)


def test_serial_correlation():
    u = uniform(STREAMS["key"])
    for lag in (1, 2, 3, 32, 64, 127, 256, 4096, 65536):
        assert abs(np.mean(u[:-lag] * u[lag:])) <= 5 / np.sqrt(N - lag)


def test_streams_do_not_correlate_at_any_small_shift():
    names = list(STREAMS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            x, y = STREAMS[a], STREAMS[b]
            assert np.mean(x == y) <= 5 / N
            for lag in range(8):
                u, v = uniform(x[: N - lag]), uniform(y[lag:])
                assert abs(np.mean(u * v)) <= 5 / np.sqrt(N - lag), (a, b, lag)
                agree = np.mean(np.bitwise_count(~(x[: N - lag] ^ y[lag:]))) - 16
                assert abs(agree) <= 5 * np.sqrt(8 / (N - lag)), (a, b, lag)


def test_seeds_that_are_close_give_streams_that_are_not():
    bits = jax.jit(_random.bits, static_argnums=2)
    base = np.asarray(bits(np.uint32(5), np.uint32(9), N))
    for first, second in ((6, 9), (5, 10), (6, 10), (4, 8)):
        other = np.asarray(bits(np.uint32(first), np.uint32(second), N))
        assert np.mean(base == other) <= 5 / N
        assert abs(np.mean(np.bitwise_count(base ^ other)) - 16) <= 5 * np.sqrt(8 / N)


def test_a_flipped_bit_of_the_counter_flips_half_of_the_result():
    base, mix = np.arange(1 << 12, dtype=np.uint32), jax.jit(_random._mix)
    for bit in range(32):
        a, b = (np.asarray(mix(x)) for x in (base, base ^ np.uint32(1 << bit)))
        assert 14 < np.mean(np.bitwise_count(a ^ b)) < 18
