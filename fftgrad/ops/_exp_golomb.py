"""Exponential-Golomb codes, which store small numbers in few bits and have no largest number.

Let q = (v >> r) + 1 and e = floor(log2 q). The code of order r of a number v has 2e + 1 + r bits.
The unary part is e zeros and a one. The rest is the e low bits of q, then the r low bits of v.

The unary parts of all codes are stored in a row from the first word on. The rests are stored from
the last word backwards. Each unary part ends with a set bit. An accelerator reads all codes at
once: rank and select find the set bits, and sums of the exponents e give the places of the rests.
On a CPU, codes are written and read one after the other, which takes a third of the time there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from fftgrad import _axes
from fftgrad.ops import _count, _platform, _positions

Arrays = tuple[jax.Array, ...]

WORD = 32


class Writer(NamedTuple):
    """Stream of bits to write to."""

    words: jax.Array  # uint32[m + 1], complete before the word that contains `place`
    place: jax.Array  # first bit of the next code, int32[]
    pending: jax.Array  # bits written so far to the word that contains `place`, uint32[]

    def put(self, bits: jax.Array, width: jax.Array) -> "Writer":
        """Append `width` bits, at most 32. In `bits`, all higher bits must be zero."""
        at, low = _word_and_bit(self.place)
        pending = self.pending | bits << low
        words = _stored(self.words, at, pending)
        place = self.place + width
        over = (bits >> 1) >> (WORD - 1 - low)
        return Writer(words, place, jnp.where(_word_and_bit(place)[0] == at, pending, over))

    def end(self) -> jax.Array:
        return _stored(self.words, _word_and_bit(self.place)[0], self.pending)[:-1]


class Ones(NamedTuple):
    """Reads the places of the set bits, in order."""

    at: jax.Array  # index of the current word, int32[]
    rest: jax.Array  # unread bits of the current word, uint32[]

    def next(self, words: jax.Array) -> tuple["Ones", jax.Array]:
        """Return the place of the next set bit, in the current word or in the next word."""
        over = self.rest == 0
        at = jnp.where(over, self.at + 1, self.at)
        rest = jnp.where(over, _loaded(words, at), self.rest)
        below = lax.population_count(~rest & rest - 1).astype(jnp.int32)
        return Ones(at, rest & rest - 1), WORD * at + below


def _read_bits(
    word: Callable[[jax.Array], jax.Array], place: jax.Array, width: jax.Array
) -> jax.Array:
    """Return the `width` bits that start at `place`, at most 31, as int32."""
    at, low = _word_and_bit(place)
    above = (word(at + 1) << 1) << (WORD - 1 - low)
    bits = word(at) >> low | above
    return (bits & (jnp.uint32(1) << width.astype(jnp.uint32)) - 1).astype(jnp.int32)


def _word_and_bit(place: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A shift is one operation; a division of signed integers takes eight.
    return place >> 5, (place & WORD - 1).astype(jnp.uint32)


def _stored(words: jax.Array, at: jax.Array, word: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(words, word[None], (at,), allow_negative_indices=False)


def _loaded(words: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_slice(words, (at,), (1,), allow_negative_indices=False)[0]


def exponents(numbers: jax.Array, orders: jax.Array | int) -> jax.Array:
    """Return the exponent e of each number, int32; numbers must be below 2**31 - 2**order."""
    return 31 - lax.clz((numbers >> orders) + 1)


def words_for(count: jax.Array, exponents: jax.Array, orders: jax.Array) -> jax.Array:
    """Return the words for `count` codes, from the sums of their exponents and of their orders."""
    return -(-(exponents + count) // WORD) - (-(exponents + orders) // WORD)


def encode(
    numbers: Sequence[jax.Array], orders: Sequence[jax.Array | int], used: jax.Array, words: int
) -> jax.Array:
    """Encode columns int32[m] of numbers >= 0, row by row, as uint32[words]; see `words_for`.

    Rows where `used`, bool[m], is False are not sent. The codes must fit into `words`.
    """
    return _platform.dependent(
        tuple(numbers),
        _each_as_array(orders, used),
        used,
        cpu=sequential_vmap(functools.partial(_encode_in_order, words=words)),
        default=functools.partial(_encode_at_once, words=words),
    )


def _encode_in_order(numbers: Arrays, orders: Arrays, used: jax.Array, words: int) -> jax.Array:
    def write(streams: Any, row: tuple[Arrays, jax.Array]) -> Any:
        unary, rests = streams
        for number, order in zip(row[0], orders, strict=True):
            exponent = exponents(number, order)
            one = jnp.where(row[1], jnp.uint32(1) << exponent.astype(jnp.uint32), 0)
            unary = unary.put(one, jnp.where(row[1], exponent + 1, 0))
            width = jnp.where(row[1], exponent + order, 0)
            rest = jnp.where(row[1], _rest(number, order, exponent), 0)
            rests = rests.put(rest, width)
        return (unary, rests), None

    start = jnp.zeros((words + 1,), jnp.uint32), jnp.int32(0), jnp.uint32(0)
    empty = Writer(*(_axes.vary_like(x, used) for x in start))
    (unary, rests), _ = lax.scan(write, (empty, empty), (numbers, used))
    return unary.end() | rests.end()[::-1]


def _encode_at_once(numbers: Arrays, orders: Arrays, used: jax.Array, words: int) -> jax.Array:
    columns = list(zip(numbers, orders, strict=True))
    # In unused rows, exponents count as 0, so that the places of the used rows follow each other.
    each = [jnp.where(used, exponents(*c), 0) for c in columns]
    counted = jnp.stack([sum(each[1:], each[0]), used.astype(jnp.int32)])
    before, index = jax.vmap(_count.cumsum)(counted) - counted
    end = before + len(each) * index - 1
    start = before + sum(orders) * index
    parts = []  # places of words and their bits
    for (number, order), exponent in zip(columns, each, strict=True):
        end = end + exponent + 1
        at, low = _word_and_bit(end)
        parts.append((at, jnp.uint32(1) << low))
        # Rests are stored backwards. A place may be -1: that is the last word, and adds no bits.
        at, low = _word_and_bit(start)
        rest = _rest(number, order, exponent)
        parts.append((words - 1 - at, rest << low))
        parts.append((words - 2 - at, (rest >> 1) >> (WORD - 1 - low)))
        start = start + exponent + order
    # A scatter for each part would read all columns again. No bit is set twice, so add the bits.
    at, bits = (jnp.stack(x, axis=1) for x in zip(*parts, strict=True))
    stream = _axes.vary_like(jnp.zeros((words,), jnp.uint32), used)
    return stream.at[at].add(jnp.where(used[:, None], bits, 0), mode="drop")


def decode(words: jax.Array, orders: Sequence[jax.Array | int], count: int) -> Arrays:
    """Decode the columns int32[count] of numbers; rows that were not sent are arbitrary."""
    return _platform.dependent(
        words,
        _each_as_array(orders, words),
        cpu=sequential_vmap(functools.partial(_decode_in_order, count=count)),
        default=functools.partial(_decode_at_once, count=count),
    )


def _decode_in_order(words: jax.Array, orders: Arrays, count: int) -> Arrays:
    rests = words[::-1]

    def read(carry: Any, _: None) -> Any:
        ones, last, start = carry
        row = []
        for order in orders:
            ones, end = ones.next(words)
            exponent = jnp.clip(end - last - 1, 0, WORD - 2)
            width = exponent + order
            rest = _read_bits(lambda at: _loaded(rests, at), start, width)
            row.append(rest + (1 << width) - (1 << order))
            last, start = end, start + width
        return (ones, last, start), tuple(row)

    last, zero = (_axes.vary_like(jnp.int32(i), words) for i in (-1, 0))
    return lax.scan(read, (Ones(zero, words[0]), last, zero), length=count)[1]


def _decode_at_once(words: jax.Array, orders: Arrays, count: int) -> Arrays:
    ends = _positions.select(_positions.rank(words), count * len(orders))
    gaps = jnp.clip(jnp.diff(ends, prepend=-1) - 1, 0, WORD - 2).reshape(count, len(orders))
    each = [gaps[:, i] for i in range(len(orders))]
    rows = sum(each[1:], each[0])
    start = _count.cumsum(rows) - rows + sum(orders) * lax.iota(jnp.int32, count)
    stream, out = words[::-1], []
    for order, exponent in zip(orders, each, strict=True):
        width = exponent + order
        rest = _read_bits(lambda at: stream.at[at].get(mode="clip"), start, width)
        out.append(rest + (1 << width) - (1 << order))
        start = start + width
    return tuple(out)


def _each_as_array(orders: Sequence[jax.Array | int], like: jax.Array) -> Arrays:
    return tuple(_axes.vary_like(jnp.int32(order), like) for order in orders)


def _rest(number: jax.Array, order: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return the bits of a code after its unary part."""
    return (number + (1 << order) - (1 << exponent + order)).astype(jnp.uint32)
