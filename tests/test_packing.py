"""Packed codes, bitmaps and indices, against Python integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fftgrad.packing import _bitmap, _codes, _indices


@pytest.mark.parametrize("bits", range(1, 33))
@pytest.mark.parametrize("count", [0, 1, 31, 33, 100])
def test_codes_are_one_stream_of_bits(bits, count):
    codes = np.random.default_rng(bits).integers(0, 2**bits, count, dtype=np.uint64)
    words = _codes.pack(jnp.asarray(codes.astype(np.uint32)), bits)
    assert words.tolist() == reference.stream(codes, bits)
    assert words.size == _codes.words_for(count, bits) == -(-count * bits // 32)
    np.testing.assert_array_equal(_codes.unpack(words, bits, count), codes)


@given(mask=hnp.arrays(bool, 300))
def test_select_finds_every_set_bit(mask):
    (words,) = _bitmap.pack(jnp.asarray(mask))
    expected = np.flatnonzero(mask)
    found = np.asarray(_bitmap.select(words, 300))[: expected.size]
    np.testing.assert_array_equal(found, expected)
    for rank in range(0, expected.size, 37):
        assert _bitmap.select_one(words, jnp.int32(rank)) == expected[rank]


@pytest.mark.parametrize(("n", "k"), [(33, 1), (64, 63), (500, 5), (500, 200), (4096, 40)])
def test_indices_round_trip(n, k):
    rng = np.random.default_rng(n)
    for _ in range(5):
        mask = np.zeros(n, bool)
        mask[rng.permutation(n)[:k]] = True
        positions, code = jax.jit(lambda m: _indices.encode(*_bitmap.pack(m), k, n))(
            jnp.asarray(mask)
        )
        np.testing.assert_array_equal(positions, np.flatnonzero(mask))
        np.testing.assert_array_equal(_indices.decode(code, k, n), np.flatnonzero(mask))


@pytest.mark.parametrize("edge", ["first", "last"])
def test_indices_at_the_edges(edge):
    n, k = 10_000, 100
    mask = np.zeros(n, bool)
    mask[slice(0, k) if edge == "first" else slice(n - k, n)] = True
    _, code = _indices.encode(*_bitmap.pack(jnp.asarray(mask)), k, n)
    np.testing.assert_array_equal(_indices.decode(code, k, n), np.flatnonzero(mask))


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        (1 << 20, 10_486, _indices.EliasFano),
        (1 << 20, 157_286, _indices.EliasFano),
        (1 << 20, 400_000, _indices.Bitmap),
    ],
)
def test_the_smaller_code_is_chosen_from_the_shapes(n, k, kind):
    _, code = jax.eval_shape(
        lambda m: _indices.encode(*_bitmap.pack(m), k, n), jax.ShapeDtypeStruct((n,), bool)
    )
    assert type(code) is kind
    bits = 32 * sum(leaf.size for leaf in jax.tree.leaves(code))
    assert bits <= min(n + 31, k * (2 + np.log2(n / k)) + 96)


def test_an_index_at_one_percent_takes_8_6_bits():
    n = 1 << 22
    k = n // 100
    _, code = jax.eval_shape(
        lambda m: _indices.encode(*_bitmap.pack(m), k, n), jax.ShapeDtypeStruct((n,), bool)
    )
    assert 32 * sum(leaf.size for leaf in jax.tree.leaves(code)) / k <= 8.6


@pytest.mark.parametrize(("n", "k"), [(500, 20), (500, 200)])
@given(data=st.data())
def test_arbitrary_words_decode_within_bounds(n, k, data):
    _, like = jax.eval_shape(
        lambda m: _indices.encode(*_bitmap.pack(m), k, n), jax.ShapeDtypeStruct((n,), bool)
    )
    code = jax.tree.map(lambda a: jnp.asarray(data.draw(hnp.arrays(np.uint32, a.shape))), like)
    found = _indices.decode(code, k, n)
    assert int(found.min()) >= 0
    assert int(found.max()) < n
