"""k ascending positions below n, as a bitmap or in Elias-Fano code, whichever is smaller.

Elias-Fano splits a position into its l = floor(log2(n/k)) low bits, stored as they are, and the
rest, stored as a bitmap in unary: bit (p_j >> l) + j is set for the j-th position p_j. That takes
k·l bits and k + (n-1 >> l) + 1 bits, at most k(2 + l) and a word or two, within half a bit an
index of the entropy. Both sizes follow from k and n alone, so the choice is static.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad.ops.packing import _bitmap, _codes


class EliasFano(NamedTuple):
    """Positions in Elias-Fano code: `low` uint32 words of low bits, `high` of the unary bitmap."""

    low: jax.Array
    high: jax.Array


class Bitmap(NamedTuple):
    """Positions as one bit for each of the n candidates."""

    words: jax.Array


def encode(bitmap: _bitmap.Ranked, k: int, n: int) -> tuple[jax.Array, EliasFano | Bitmap]:
    """The positions of the k bits set in a bitmap of n, int32[k] ascending, and their code."""
    positions = _bitmap.select(bitmap, k)
    if not _is_elias_fano(k, n):
        return positions, Bitmap(bitmap.words)
    return positions, _elias_fano(positions, k, n)


def encode_positions(positions: jax.Array, k: int, n: int) -> EliasFano | Bitmap:
    """The code of k ascending positions, all different."""
    if not _is_elias_fano(k, n):
        return Bitmap(_bitmap.from_positions(positions, 1, n))
    return _elias_fano(positions, k, n)


def words_for(k: int, n: int) -> int:
    """How many words the code of k positions below n fills."""
    return min(_elias_fano_words(k, n), _codes.words_for(n, 1))


def _elias_fano(positions: jax.Array, k: int, n: int) -> EliasFano:
    l = _low_bits(k, n)
    low = _codes.pack(positions.astype(jnp.uint32) & jnp.uint32((1 << l) - 1), l)
    unary = (positions >> l) + jnp.arange(k, dtype=jnp.int32)
    return EliasFano(low, _bitmap.from_positions(unary, 1, _unary_bits(k, n)))


def decode(code: EliasFano | Bitmap, k: int, n: int) -> jax.Array:
    """The positions int32[k]; below n whatever the words hold."""
    match code:
        case Bitmap(words):
            positions = _bitmap.select(_bitmap.rank(words), k)
        case EliasFano(low, high):
            l = _low_bits(k, n)
            upper = _bitmap.select(_bitmap.rank(high), k) - jnp.arange(k, dtype=jnp.int32)
            positions = (upper << l) | _codes.unpack(low, l, k).astype(jnp.int32)
    return jnp.clip(positions, 0, n - 1)


def _low_bits(k: int, n: int) -> int:
    return (n // k).bit_length() - 1


def _unary_bits(k: int, n: int) -> int:
    return k + ((n - 1) >> _low_bits(k, n)) + 1


def _elias_fano_words(k: int, n: int) -> int:
    return _codes.words_for(k, _low_bits(k, n)) + _codes.words_for(_unary_bits(k, n), 1)


def _is_elias_fano(k: int, n: int) -> bool:
    return _elias_fano_words(k, n) < _codes.words_for(n, 1)
