"""Rank and select on a bitmap of uint32 words: sparse positions without a scan over n.

A running sum over n/32 words is all that is needed; inside a word the j-th set bit takes five
popcounts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _platform, _scan
from fftgrad.ops.packing import _codes

WORD = 32


class Ranked(NamedTuple):
    """A bitmap, and how many bits are set before each of its words, int32."""

    words: jax.Array
    before: jax.Array


def pack(*masks: jax.Array) -> tuple[jax.Array, ...]:
    """Masks bool[n] as words uint32[ceil(n / 32)]; position i is bit i % 32 of word i // 32.

    Masks of the same data are packed together in one pass over it.
    """
    return _codes.pack_whole(*masks, bits=1)


def unpack(words: jax.Array, count: int) -> jax.Array:
    """The first `count` bits, bool[count]."""
    bits = (words[:, None] >> _places()) & 1
    return bits.ravel()[:count].astype(bool)


def from_positions(positions: jax.Array, keep: jax.Array | int, size: int) -> jax.Array:
    """The bitmap uint32[ceil(size / 32)] with a bit at each of the positions that has `keep` 1.

    Those positions must differ: a bit is set by adding it.
    """
    bit = jnp.asarray(keep, jnp.uint32) << (positions % WORD).astype(jnp.uint32)
    words = jnp.zeros((-(-size // WORD),), jnp.uint32)
    return words.at[positions // WORD].add(bit, indices_are_sorted=True, mode="drop")


def count(words: jax.Array) -> jax.Array:
    """How many bits are set, int32[]."""
    return jnp.sum(_population(words), dtype=jnp.int32)


def rank(words: jax.Array) -> Ranked:
    """The bitmap, ready to be looked into."""
    population = _population(words)
    return Ranked(words, _scan.cumsum(population) - population)


def select(bitmap: Ranked, count: int) -> jax.Array:
    """The positions of the first `count` set bits, ascending, int32[count].

    Where fewer bits are set the rest is unspecified, but within the bitmap.
    """
    found = _platform.dependent(
        bitmap,
        cuda=functools.partial(_select_by_bit, count=count),
        rocm=functools.partial(_select_by_bit, count=count),
        default=functools.partial(_select_by_word, count=count),
    )
    # Kept, because each of its readers would find it again.
    return lax.optimization_barrier(found)


def _select_by_word(bitmap: Ranked, count: int) -> jax.Array:
    """It, by looking for the word of each rank: work on n/32 words, and on `count` ranks."""
    words, before = bitmap
    slot = jnp.where(words > 0, before, count)
    starts = jnp.zeros((count,), jnp.int32)
    starts = starts.at[slot].set(jnp.arange(words.size, dtype=jnp.int32), mode="drop")
    word = _scan.cummax(starts)
    rank = jnp.arange(count, dtype=jnp.int32) - before[word]
    return WORD * word + _select_in_word(words[word], rank)


def _select_by_bit(bitmap: Ranked, count: int) -> jax.Array:
    """It, by looking for the rank of each bit: work on n bits, but in few kernels."""
    words, before = bitmap
    below = ~(jnp.uint32(0xFFFFFFFF) << _places())
    bits, place = words[:, None], _places().astype(jnp.int32)
    is_set = (bits >> _places()) & 1 == 1
    slot = jnp.where(is_set, before[:, None] + _population(bits & below), count)
    position = WORD * lax.iota(jnp.int32, words.size)[:, None] + place
    return jnp.zeros((count,), jnp.int32).at[slot].set(position, mode="drop")


def first(bitmap: Ranked, count: jax.Array | int) -> Ranked:
    """The bitmap of the first `count` of the bits that are set."""
    kept = _platform.dependent(
        bitmap, jnp.int32(count), cpu=_first_to_a_word, default=_first_of_each_word
    )
    return Ranked(kept, jnp.minimum(bitmap.before, count))


def _first_to_a_word(bitmap: Ranked, count: jax.Array) -> jax.Array:
    """Whole words, up to the one in which the last bit is: one is cut."""
    words, before = bitmap
    last = jnp.maximum(jnp.sum(before < count, dtype=jnp.int32) - 1, 0)
    number = lax.iota(jnp.int32, words.size)
    cut = _first_in_word(words[last], count - before[last])
    return jnp.where(number < last, words, jnp.where(number == last, cut, jnp.uint32(0)))


def _first_of_each_word(bitmap: Ranked, count: jax.Array) -> jax.Array:
    """Each word on its own: more work, in a single kernel."""
    words, before = bitmap
    left = count - before
    return jnp.where(left > 0, _first_in_word(words, left), jnp.uint32(0))


def _first_in_word(words: jax.Array, count: jax.Array) -> jax.Array:
    """The bits below the first one that is too many."""
    many = _select_in_word(words, count).astype(jnp.uint32)
    below = words & ~(jnp.uint32(0xFFFFFFFF) << many)
    return jnp.where(count >= _population(words), words, below)


def _places() -> jax.Array:
    """The place of each bit in a word, uint32[1, 32].

    Made where it is used: a constant would be an operand of the conditionals around it, whose
    branches jax.vmap cannot then type by axes.
    """
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
