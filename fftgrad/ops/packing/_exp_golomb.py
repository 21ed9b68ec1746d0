"""Exponential-Golomb codes: numbers of no known limit, small ones in few bits.

With q = (v >> r) + 1 and e = floor(log2 q), the code of order r of a number v is e zeros and a one,
and then the e bits of q below its leading one and the r low bits of v: 2e + 1 + r bits. It suits
numbers whose density falls as a power, whatever their scale; the order is about the logarithm of
the most frequent ones.

So that all numbers can be found at once, the unary halves of all codes stand together, from the
first word on, and the other halves from the last word backwards. The end of each unary half is a
bit that is set, which rank and select find; where the other half is follows from all the exponents
before it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad.ops import _platform, _scan
from fftgrad.ops.packing import _bitmap

WORD = 32


def exponents(numbers: jax.Array, orders: jax.Array | int) -> jax.Array:
    """The exponent e of each number int32, below 2**31 - 2**order, int32."""
    return 31 - lax.clz((numbers >> orders) + 1)


def words_for(count: jax.Array, exponents: jax.Array, orders: jax.Array) -> jax.Array:
    """How many words codes take, from how many they are and the sums of exponents and orders."""
    return -(-(exponents + count) // WORD) - (-(exponents + orders) // WORD)


def encode(
    numbers: Sequence[jax.Array],
    orders: Sequence[jax.Array | int],
    used: jax.Array,
    words: int,
) -> jax.Array:
    """Codes as words uint32[words]: of the first numbers of each column, then of the second, ...

    Args:
      numbers: columns int32[m], not negative.
      orders: of the codes of each column.
      used: which of the m rows to send, bool[m].
      words: how many there are: at least what `words_for` says.
    """
    # Without those of rows that are not used, places would not ascend.
    each = [jnp.where(used, exponents(*c), 0) for c in zip(numbers, orders, strict=True)]
    before = _before(each)
    ones = used.astype(jnp.int32)
    index = _scan.cumsum(ones) - ones
    end = before + len(each) * index - 1
    start = before + sum(orders) * index

    def add(_: jax.Array, carry: Any) -> Any:
        unary, stream, end, start, ((number, order), *others) = carry
        exponent = jnp.where(used, exponents(number, order), 0)
        end = end + exponent + 1
        unary = _add(unary, end // WORD, _bit(end), used)
        # v less its leading one, and with what q has more than v >> order.
        rest = (number + (1 << order) - (1 << exponent + order)).astype(jnp.uint32)
        place = (start % WORD).astype(jnp.uint32)
        stream = _add(stream, start // WORD, rest << place, used)
        stream = _add(stream, start // WORD + 1, (rest >> 1) >> (WORD - 1 - place), used)
        return unary, stream, end, start + exponent + order, [*others, (number, order)]

    empty = _axes.vary_like(jnp.zeros((words,), jnp.uint32), end)
    columns = list(zip(numbers, (_axes.vary_like(jnp.int32(o), end) for o in orders), strict=True))
    write = functools.partial(lax.fori_loop, 0, len(columns), add)
    # On a CPU a loop, whose carry is in memory: without one XLA finds it anew for each scatter.
    unary, stream, *_ = _platform.dependent(
        (empty, empty, end, start, columns),
        cpu=write,
        default=functools.partial(write, unroll=True),
    )
    return unary | stream[::-1]


def decode(
    words: jax.Array, orders: Sequence[jax.Array | int], count: int
) -> tuple[jax.Array, ...]:
    """The columns int32[count] of numbers; arbitrary ones where there are no more."""
    ends = _bitmap.select(_bitmap.rank(words), count * len(orders))
    gaps = jnp.clip(jnp.diff(ends, prepend=-1) - 1, 0, WORD - 2).reshape(count, len(orders))
    each = [gaps[:, i] for i in range(len(orders))]
    start = _before(each)
    start = start + sum(orders) * lax.iota(jnp.int32, count)
    stream, out = words[::-1], []
    for order, exponent in zip(orders, each, strict=True):
        word, place = start // WORD, (start % WORD).astype(jnp.uint32)
        width = exponent + order
        low = stream.at[word].get(mode="clip") >> place
        above = (stream.at[word + 1].get(mode="clip") << 1) << (WORD - 1 - place)
        rest = (low | above) & ((jnp.uint32(1) << width.astype(jnp.uint32)) - 1)
        out.append(rest.astype(jnp.int32) + (1 << width) - (1 << order))
        start = start + width
    return tuple(out)


def _before(exponents: list[jax.Array]) -> jax.Array:
    """The sum of all exponents in the rows before each one."""
    rows = sum(exponents[1:], exponents[0])
    return _scan.cumsum(rows) - rows


def _bit(place: jax.Array) -> jax.Array:
    return jnp.uint32(1) << (place % WORD).astype(jnp.uint32)


def _add(words: jax.Array, word: jax.Array, bits: jax.Array, used: jax.Array) -> jax.Array:
    """The words with more bits; no two share one, so to add is to combine."""
    bits = jnp.where(used, bits, 0)
    return words.at[word].add(bits, indices_are_sorted=True, mode="drop")
