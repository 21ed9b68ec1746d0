"""Codes of sparse positions below n, rank and select on bitmaps, and values at positions.

Rank counts the set bits before each word of a bitmap, by a running sum over n/32 words. Select
finds the j-th set bit: first its word, then the bit in the word by five popcounts.

k ascending positions are sent as a bitmap or in Elias-Fano code, whichever is smaller. Elias-Fano
stores the l = floor(log2(n/k)) low bits of each position unchanged, in k·l bits. The high bits are
stored as a unary bitmap of k + (n-1 >> l) + 1 bits: for the j-th position p_j, bit (p_j >> l) + j
is set. Together, these are at most k(2 + log2(n/k)) bits plus padding, within 0.6 bits per position
of the entropy. The sizes of both codes depend only on k and n, so the choice is static.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _codes, _count, _platform

WORD = 32

IN_ORDER: dict[str, Any] = {"indices_are_sorted": True, "unique_indices": True, "mode": "drop"}
"""Options of a scatter at ascending, distinct positions, which XLA can run in parallel."""


class Sparse(NamedTuple):
    """Value: a vector that is zero except at some positions; the result of `Selector.sparse`.

    Attributes:
      positions: int32 of any shape, ascending and distinct when flattened; ignored from n on.
      values: values at the positions, of the same shape.

    Example:
      >>> few = fg.codecs.Sparse(jnp.array([0, 2]), jnp.array([1.0, -1.0]))
      >>> few.add_to(jnp.ones(3), scale=2.0)
      Array([ 3.,  1., -1.], dtype=float32)
    """

    positions: jax.Array
    values: jax.Array

    def put_into(self, x: jax.Array) -> jax.Array:
        """Return `x` with the values of this vector at the positions."""
        return x.at[self.positions].set(self.values, **IN_ORDER)

    def add_to(self, x: jax.Array, scale: jax.Array | float) -> jax.Array:
        """Return `x` + scale · this vector."""
        return x.at[self.positions].add(scale * self.values, **IN_ORDER)


class EliasFano(NamedTuple):
    """Positions in Elias-Fano code: words of the low bits, and of the unary bitmap, uint32."""

    low: jax.Array
    high: jax.Array


class Bitmap(NamedTuple):
    words: jax.Array


class Ranked(NamedTuple):
    """A bitmap, and the number of set bits before each of its words, int32."""

    words: jax.Array
    before: jax.Array


def bitmap_of(positions: jax.Array, keep: jax.Array | int, size: int) -> jax.Array:
    """Return the bitmap uint32[ceil(size / 32)] of the distinct positions where `keep` is 1."""
    bit = jnp.asarray(keep, jnp.uint32) << (positions % WORD).astype(jnp.uint32)
    words = jnp.zeros((-(-size // WORD),), jnp.uint32)
    return words.at[positions // WORD].add(bit, indices_are_sorted=True, mode="drop")


def count(words: jax.Array) -> jax.Array:
    return jnp.sum(_population(words), dtype=jnp.int32)


def rank(words: jax.Array) -> Ranked:
    population = _population(words)
    return Ranked(words, _count.cumsum(population) - population)


FEW = 1 << 10
"""For bitmaps of up to FEW words, TPUs use the program of GPUs, which saves a trace."""


def select(bitmap: Ranked, count: int) -> jax.Array:
    """Return the first `count` set bits, int32[count]; missing ones are arbitrary positions."""
    by_word = functools.partial(_select_by_word, count=count)
    by_bit = functools.partial(_select_by_bit, count=count)
    on_tpu = {"tpu": by_word} if bitmap.words.size > FEW else {}
    found = _platform.dependent(bitmap, cpu=by_word, default=by_bit, **on_tpu)
    # The barrier keeps XLA from repeating the search for each reader.
    return lax.optimization_barrier(found)


def _select_by_word(bitmap: Ranked, count: int) -> jax.Array:
    """Find the word of each rank, with work on n/32 words and on `count` ranks."""
    words, before = bitmap
    slot = jnp.where(words > 0, before, count)
    starts = jnp.zeros((count,), jnp.int32)
    starts = starts.at[slot].set(jnp.arange(words.size, dtype=jnp.int32), mode="drop")
    word = _count.cummax(starts)

    def gathered() -> tuple[jax.Array, jax.Array]:
        return words[word], before[word]

    # Both branches are equal. A conditional keeps XLA from fusing the gathers with the arithmetic
    # below, which it would not vectorize then. Under `vmap` it has no effect.
    bits, first = lax.cond(words[0] == 0, gathered, gathered)
    rank = jnp.arange(count, dtype=jnp.int32) - first
    return WORD * word + _select_in_word(bits, rank)


def _select_by_bit(bitmap: Ranked, count: int) -> jax.Array:
    """Find the rank of each bit, with work on n bits, but in fewer kernels."""
    words, before = bitmap
    below = ~(jnp.uint32(0xFFFFFFFF) << _places())
    bits, place = words[:, None], _places().astype(jnp.int32)
    is_set = (bits >> _places()) & 1 == 1
    slot = jnp.where(is_set, before[:, None] + _population(bits & below), count)
    position = WORD * lax.iota(jnp.int32, words.size)[:, None] + place
    return jnp.zeros((count,), jnp.int32).at[slot].set(position, mode="drop")


def first(bitmap: Ranked, count: jax.Array | int) -> Ranked:
    """Return the bitmap of the first `count` set bits."""
    words, before = bitmap
    left = count - before
    below = words & ~(jnp.uint32(0xFFFFFFFF) << _select_in_word(words, left).astype(jnp.uint32))
    kept = jnp.where(left >= _population(words), words, below)
    return Ranked(jnp.where(left > 0, kept, jnp.uint32(0)), jnp.minimum(before, count))


def _places() -> jax.Array:
    """Return the place of each bit in a word, uint32[1, 32]."""
    # A constant would become an operand of the conditional that selects the platform. Then jax.vmap
    # infers different types for its branches in some programs.
    return lax.broadcasted_iota(jnp.uint32, (1, WORD), 1)


def _population(words: jax.Array) -> jax.Array:
    return lax.convert_element_type(lax.population_count(words), jnp.int32)


def _select_in_word(word: jax.Array, rank: jax.Array) -> jax.Array:
    position = lax.full_like(rank, 0)
    for width in (16, 8, 4, 2, 1):
        below = _population(lax.bitwise_and(word, np.uint32((1 << width) - 1)))
        above = lax.ge(rank, below)
        rank = lax.select(above, lax.sub(rank, below), rank)
        word = lax.select(above, lax.shift_right_logical(word, np.uint32(width)), word)
        position = lax.select(above, lax.add(position, np.int32(width)), position)
    return position


def encode(bitmap: Ranked, k: int, n: int) -> tuple[jax.Array, EliasFano | Bitmap]:
    """Return the ascending positions int32[k] of a bitmap with k of n bits set, and their code."""
    positions = select(bitmap, k)
    if _is_elias_fano(k, n):
        return positions, encode_positions(positions, k, n)
    return positions, Bitmap(bitmap.words)


def encode_positions(positions: jax.Array, k: int, n: int) -> EliasFano | Bitmap:
    if not _is_elias_fano(k, n):
        return Bitmap(bitmap_of(positions, 1, n))
    l = _low_bits(k, n)
    low = _codes.pack(positions.astype(jnp.uint32) & jnp.uint32((1 << l) - 1), l)
    unary = (positions >> l) + jnp.arange(k, dtype=jnp.int32)
    return EliasFano(low, bitmap_of(unary, 1, _unary_bits(k, n)))


def decode(code: EliasFano | Bitmap, k: int, n: int) -> jax.Array:
    """Decode positions int32[k]. They are below n even if the words are damaged."""
    match code:
        case Bitmap(words):
            positions = select(rank(words), k)
        case EliasFano(low, high):
            l = _low_bits(k, n)
            upper = select(rank(high), k) - jnp.arange(k, dtype=jnp.int32)
            positions = (upper << l) | _codes.unpack(low, l, k).astype(jnp.int32)
    return jnp.clip(positions, 0, n - 1)


def _low_bits(k: int, n: int) -> int:
    return (n // k).bit_length() - 1


def _unary_bits(k: int, n: int) -> int:
    return k + ((n - 1) >> _low_bits(k, n)) + 1


def words_for(k: int, n: int) -> int:
    """Return the number of words of the shorter code of k positions below n."""
    low, high = _codes.words_for(k, _low_bits(k, n)), _codes.words_for(_unary_bits(k, n), 1)
    return min(low + high, _codes.words_for(n, 1))


def _is_elias_fano(k: int, n: int) -> bool:
    return words_for(k, n) < _codes.words_for(n, 1)
