"""Streams of bits in uint32 words, written and read one code after the other, as a CPU does best.

What depends on the place is kept in registers: no word is read to be written again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes

WORD = 32


class Writer(NamedTuple):
    """A stream that is being written.

    Attributes:
      words: uint32[m + 1], complete before that of `place`.
      place: where the next code begins, int32[].
      pending: what is known of the word of `place`, uint32[].
    """

    words: jax.Array
    place: jax.Array
    pending: jax.Array

    @classmethod
    def of(cls, words: int, like: jax.Array) -> "Writer":
        """An empty stream of so many words, which varies as `like` does."""
        empty = jnp.zeros((words + 1,), jnp.uint32), jnp.int32(0), jnp.uint32(0)
        return cls(*(_axes.vary_like(x, like) for x in empty))

    def put(self, bits: jax.Array, width: jax.Array) -> "Writer":
        """With a code of `width` bits, at most 32; those above them are zero."""
        at, low = _word_and_bit(self.place)
        pending = self.pending | bits << low
        words = _stored(self.words, at, pending)
        place = self.place + width
        over = (bits >> 1) >> (WORD - 1 - low)
        return Writer(words, place, jnp.where(_word_and_bit(place)[0] == at, pending, over))

    def end(self) -> jax.Array:
        """All of its words, uint32[m]."""
        return _stored(self.words, _word_and_bit(self.place)[0], self.pending)[:-1]


class Ones(NamedTuple):
    """The places of bits that are set, read in order.

    Attributes:
      at: which word is read, int32[].
      rest: those of its bits that were not read yet, uint32[].
    """

    at: jax.Array
    rest: jax.Array

    @classmethod
    def of(cls, words: jax.Array) -> "Ones":
        """Before the first."""
        return cls(_axes.vary_like(jnp.int32(0), words), words[0])

    def next(self, words: jax.Array) -> tuple["Ones", jax.Array]:
        """After one more, and its place; it is in this word or in the next one."""
        over = self.rest == 0
        at = jnp.where(over, self.at + 1, self.at)
        rest = jnp.where(over, _loaded(words, at), self.rest)
        below = lax.population_count(~rest & rest - 1).astype(jnp.int32)
        return Ones(at, rest & rest - 1), WORD * at + below


def read(words: jax.Array, place: jax.Array, width: jax.Array) -> jax.Array:
    """The `width` bits from a place on, at most 31, as int32."""
    at, low = _word_and_bit(place)
    above = (_loaded(words, at + 1) << 1) << (WORD - 1 - low)
    bits = _loaded(words, at) >> low | above
    return (bits & (jnp.uint32(1) << width.astype(jnp.uint32)) - 1).astype(jnp.int32)


def _word_and_bit(place: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Shifts, because a quotient of signed numbers takes eight operations.
    return place >> 5, (place & WORD - 1).astype(jnp.uint32)


def _stored(words: jax.Array, at: jax.Array, word: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(words, word[None], (at,), allow_negative_indices=False)


def _loaded(words: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_slice(words, (at,), (1,), allow_negative_indices=False)[0]
