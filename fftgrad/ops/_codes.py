"""Integers of 1 to 32 bits, or digits of any base, packed into uint32 words.

Code j occupies bits [j·bits, (j+1)·bits) of all words, least significant bit first. With
g = gcd(bits, 32), the pattern repeats every 32/g codes, which fill bits/g words. Packing takes a
fixed number of elementwise passes with static shifts. Unpacking reads two neighboring words for
each code, or, if no code spans two words, all codes of a word at once.

A word holds as many digits as fit: 20 digits of base 3, at 1.6 bits each. If no sum of digits
reaches the base, adding words adds each digit. So an all-reduce can sum packed digits.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _platform, _shapes


def words_for(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack codes uint32[n], each below 2**bits, into uint32[words_for(n, bits)]."""
    per_group = period(bits)
    words_per_group = per_group * bits // 32
    if 32 % bits == 0:
        return _pack_whole(codes, bits=bits)[0]
    grouped = _shapes.rows(codes, per_group)
    columns = [jnp.zeros((grouped.shape[0],), jnp.uint32) for _ in range(words_per_group)]
    for j in range(per_group):
        word, offset = divmod(j * bits, 32)
        code = lax.index_in_dim(grouped, j, axis=1, keepdims=False)
        columns[word] = columns[word] | lax.shift_left(code, np.uint32(offset))
        if offset + bits > 32:
            columns[word + 1] = lax.shift_right_logical(code, np.uint32(32 - offset))
    return jnp.stack(columns, axis=1).ravel()[: words_for(codes.size, bits)]


def _pack_whole(*codes: jax.Array, bits: int) -> tuple[jax.Array, ...]:
    """Pack codes of a width that divides 32. Several codes of the same data take one pass."""
    per_word = 32 // bits

    def words(*codes: jax.Array) -> tuple[jax.Array, ...]:
        shifts = bits * jnp.arange(per_word, dtype=jnp.uint32)[None]
        shifted = [_shapes.rows(c, per_word).astype(jnp.uint32) << shifts for c in codes]
        # One reduction with several results reads its data once; several reductions may not.
        zeros = (np.uint32(0),) * len(codes)
        return tuple(lax.reduce(tuple(shifted), zeros, _or_each, (1,)))

    return _shapes.whole_then_rest(words, per_word, *codes)


def _or_each(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(map(operator.or_, a, b))


def unpack(words: jax.Array, bits: int, count: int) -> jax.Array:
    """Unpack uint32[words_for(count, bits)] into codes uint32[count]."""
    per_group = period(bits)
    if 32 % bits == 0:
        codes = words[:, None] >> bits * jnp.arange(per_group, dtype=jnp.uint32)[None]
        return codes.ravel()[:count] & jnp.uint32((1 << bits) - 1)
    group, place = np.uint32(per_group), np.uint32(bits)
    j = lax.iota(jnp.uint32, count)
    start = lax.rem(j, group) * place  # bit position within a group, which cannot overflow
    words_per_group = np.uint32(per_group * bits // 32)
    word = lax.convert_element_type(lax.div(j, group) * words_per_group + (start >> 5), jnp.int32)
    offset = start & 31
    code = words[word] >> offset
    rest = words[jnp.minimum(word + 1, words.size - 1)] << (32 - offset & 31)
    code = jnp.where(offset + place > 32, code | rest, code)
    return code & jnp.uint32((1 << bits) - 1)


def pack_masks(*masks: jax.Array) -> tuple[jax.Array, ...]:
    """Pack masks bool[n] into uint32[ceil(n / 32)]; position i is bit i % 32 of word i // 32."""
    return _pack_whole(*masks, bits=1)


def unpack_mask(words: jax.Array, count: int) -> jax.Array:
    return unpack(words, 1, count).astype(bool)


def period(bits: int) -> int:
    """Return the least number of codes that fill whole words."""
    return 32 // math.gcd(bits, 32)


PIECE = 1 << 16


def digits_per_word(base: int) -> int:
    count = 1
    while base ** (count + 1) <= 1 << 32:
        count += 1
    return count


def words_for_digits(count: int, base: int) -> int:
    return -(-count // digits_per_word(base))


def pack_digits(digits: jax.Array, base: int) -> jax.Array:
    """Pack digits uint32[n], each below `base`, into uint32[words_for_digits(n, base)]."""
    width = digits_per_word(base)
    powers = np.array([[base**place for place in range(width)]], np.uint32)

    def words(digits: jax.Array) -> tuple[jax.Array]:
        return (jnp.sum(_shapes.rows(digits, width) * powers, axis=1, dtype=jnp.uint32),)

    return _shapes.whole_then_rest(words, width, digits)[0]


def unpack_digits(words: jax.Array, base: int, count: int) -> jax.Array:
    """Unpack words into digits uint32[count]."""
    if digits_per_word(base) == 1:
        return words[:count]
    digits = _platform.dependent(
        words,
        cpu=functools.partial(_digits_in_pieces, base=base),
        default=functools.partial(_digits, base=base),
    )
    return digits.ravel()[:count]


def _digits_in_pieces(words: jax.Array, base: int) -> jax.Array:
    # Without the loop, XLA fuses the final slice, and computes each digit separately.
    pieces = _shapes.rows(words, max(1, min(PIECE, words.size)))
    digits = lax.map(functools.partial(_digits, base=base), pieces)
    return digits.reshape(-1, digits_per_word(base))[: words.size]


def _digits(words: jax.Array, base: int) -> jax.Array:
    """Return the digits uint32[m, digits_per_word(base)] of words uint32[m].

    XLA does not vectorize integer division. So one division splits a word into two halves, which
    float32 holds exactly. Before each multiplication, adding 0.5 absorbs the rounding error.
    """
    width = digits_per_word(base)
    half = -(-width // 2)
    high = words // np.uint32(base**half)
    low = words - high * np.uint32(base**half)
    place = np.arange(width)[None]
    part = jnp.where(place < half, low[:, None], high[:, None])
    above = _down(part, 1 / float(base) ** (place % half))
    return (above - base * _down(above, 1 / base)).astype(jnp.uint32)


def _down(part: jax.Array, factor: np.ndarray | float) -> jax.Array:
    middle = part.astype(jnp.int32).astype(jnp.float32) + np.float32(0.5)
    return (middle * np.asarray(factor, np.float32)).astype(jnp.int32)
