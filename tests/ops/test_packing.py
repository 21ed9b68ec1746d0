"""Packed codes, bitmaps and indices, against Python integers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import EVERY_CASE, sample
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fftgrad.ops import _codes, _count, _positions

pack_codes = jax.jit(_codes.pack, static_argnums=1)
unpack_codes = jax.jit(_codes.unpack, static_argnums=(1, 2))
pack = jax.jit(_codes.pack_masks)
select = jax.jit(lambda words, k: _positions.select(_positions.rank(words), k), static_argnums=1)
first = jax.jit(lambda words, count: _positions.first(_positions.rank(words), count).words)
decode = jax.jit(_positions.decode, static_argnums=(1, 2))


unpack_digits = jax.jit(_codes.unpack_digits, static_argnums=(1, 2))
pack_digits = jax.jit(_codes.pack_digits, static_argnums=1)


def numbered(row):
    """Each value of each parameter is a kind."""
    return set(enumerate(row))


@functools.partial(jax.jit, static_argnums=(1, 2))
def encode(mask, k, n):
    (words,) = _codes.pack_masks(mask)
    return _positions.encode(_positions.rank(words), k, n)


@pytest.mark.parametrize(
    ("bits", "count"), sample(itertools.product(range(1, 33), [0, 1, 31, 33, 100]), numbered)
)
def test_codes_are_one_stream_of_bits(bits, count):
    codes = np.random.default_rng(bits).integers(0, 2**bits, count, dtype=np.uint64)
    words = pack_codes(jnp.asarray(codes.astype(np.uint32)), bits)
    assert words.tolist() == reference.stream(codes, bits)
    assert words.size == _codes.words_for(count, bits) == -(-count * bits // 32)
    np.testing.assert_array_equal(unpack_codes(words, bits, count), codes)


BASES = [2, 3, 5, 7, 63, 255, 257, 1290, 1625, 1626, 65535, 65537]
LEFT_OUT = ["none", "one", "all but one"]


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(("base", "left_out"), sample(itertools.product(BASES, LEFT_OUT), numbered))
def test_digits_are_those_of_integers(base, left_out):
    width, rng = _codes.digits_per_word(base), np.random.default_rng(base)
    powers = np.array([base**place for place in range(width)], np.uint64)
    top = min(base**width, 1 << 32)
    # Next to a multiple of a power, a quotient that is a bit too small would show.
    near = [power * rng.integers(0, top // power, 99, dtype=np.uint64) for power in powers.tolist()]
    words = np.concatenate([w + np.uint64(more) for w in near for more in (0, 1, base - 1)])
    words = np.concatenate([words, [0, top - 1]]).clip(0, top - 1).astype(np.uint32)
    digits = (words.astype(np.uint64)[:, None] // powers % np.uint64(base)).ravel()
    count = {"none": digits.size, "one": digits.size - 1, "all but one": 1}[left_out]
    for n in (0, count):
        unpacked = unpack_digits(words[: _codes.words_for_digits(n, base)], base, n)
        np.testing.assert_array_equal(unpacked, digits[:n])
    np.testing.assert_array_equal(pack_digits(digits.astype(np.uint32), base), words)


@pytest.mark.usefixtures("platform")
@given(mask=hnp.arrays(bool, 300))
def test_select_finds_every_set_bit(mask):
    (words,) = pack(jnp.asarray(mask))
    expected = np.flatnonzero(mask)
    found = np.asarray(select(words, 300))[: expected.size]
    np.testing.assert_array_equal(found, expected)
    for count in (-1, 0, *range(1, expected.size, 37), expected.size, 400):
        (prefix,) = pack(jnp.asarray(mask & (np.cumsum(mask) <= count)))
        np.testing.assert_array_equal(first(words, jnp.int32(count)), prefix)


@pytest.mark.parametrize(("n", "k"), [(33, 1), (64, 63), (500, 5), (500, 200), (4096, 40)])
def test_indices_round_trip(n, k):
    rng = np.random.default_rng(n)
    for turn in range(5):
        mask = np.zeros(n, bool)
        mask[rng.permutation(n)[:k] if turn else slice(n - k, n)] = True
        positions, code = encode(jnp.asarray(mask), k, n)
        np.testing.assert_array_equal(positions, np.flatnonzero(mask))
        np.testing.assert_array_equal(decode(code, k, n), np.flatnonzero(mask))


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        (1 << 20, 10_486, _positions.EliasFano),
        (1 << 20, 157_286, _positions.EliasFano),
        (1 << 20, 400_000, _positions.Bitmap),
    ],
)
def test_the_smaller_code_is_chosen_from_the_shapes(n, k, kind):
    _, code = jax.eval_shape(lambda m: encode(m, k, n), jax.ShapeDtypeStruct((n,), bool))
    assert type(code) is kind
    bits = 32 * sum(leaf.size for leaf in jax.tree.leaves(code))
    assert bits <= min(n + 31, k * (2 + np.log2(n / k)) + 96)
    assert k > n // 100 + 1 or bits / k <= 8.6


@pytest.mark.parametrize(("n", "k"), [(500, 20), (500, 200)])
@given(data=st.data())
def test_arbitrary_words_decode_within_bounds(n, k, data):
    _, like = jax.eval_shape(lambda m: encode(m, k, n), jax.ShapeDtypeStruct((n,), bool))
    code = jax.tree.map(lambda a: jnp.asarray(data.draw(hnp.arrays(np.uint32, a.shape))), like)
    found = decode(code, k, n)
    assert int(found.min()) >= 0
    assert int(found.max()) < n


@EVERY_CASE
@pytest.mark.usefixtures("platform")
def test_running_sums_and_maxima():
    for n in (1, 128, 129, 1_100_000):
        x = np.random.default_rng(n).integers(0, 1000, n).astype(np.int32)
        sums, maxima = jax.jit(lambda x: (_count.cumsum(x), _count.cummax(x)))(x)
        np.testing.assert_array_equal(sums, np.cumsum(x))
        np.testing.assert_array_equal(maxima, np.maximum.accumulate(x))
