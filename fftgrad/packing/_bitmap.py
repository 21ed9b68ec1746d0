"""Rank and select on a bitmap of uint32 words: sparse positions without a pass of scans over n.

A cumulative sum over n costs far more than one over n/32 words; inside a word the j-th set bit
takes five popcounts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.packing import _codes


def pack(mask: jax.Array) -> jax.Array:
    """A mask bool[n] as words uint32[ceil(n / 32)]; position i is bit i % 32 of word i // 32."""
    return _codes.pack(mask.astype(jnp.uint32), 1)


def select(words: jax.Array, count: int) -> jax.Array:
    """The positions of the first `count` set bits, ascending, int32[count].

    Where fewer bits are set the rest is unspecified, but within the bitmap.
    """
    population = lax.population_count(words).astype(jnp.int32)
    before = jnp.cumsum(population) - population
    slot = jnp.where(population > 0, before, count)
    starts = jnp.zeros((count,), jnp.int32)
    starts = starts.at[slot].set(jnp.arange(words.size, dtype=jnp.int32), mode="drop")
    word = lax.cummax(starts)
    rank = jnp.arange(count, dtype=jnp.int32) - before[word]
    return 32 * word + _select_in_word(words[word], rank)


def select_one(words: jax.Array, rank: jax.Array) -> jax.Array:
    """The position of the set bit with `rank` set bits before it, int32[]."""
    population = lax.population_count(words).astype(jnp.int32)
    upto = jnp.cumsum(population)
    word = jnp.minimum(jnp.sum((upto <= rank).astype(jnp.int32)), words.size - 1)
    return 32 * word + _select_in_word(words[word], rank - (upto[word] - population[word]))


def _select_in_word(word: jax.Array, rank: jax.Array) -> jax.Array:
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        below = lax.population_count(word & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        above = rank >= below
        rank = jnp.where(above, rank - below, rank)
        word = jnp.where(above, word >> width, word)
        position = jnp.where(above, position + width, position)
    return position
