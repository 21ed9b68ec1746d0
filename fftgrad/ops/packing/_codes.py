"""Integers of 1 to 32 bits, end to end in uint32 words.

Code j occupies bits [j·bits, (j+1)·bits) of the stream, least significant first. With
g = gcd(bits, 32), the pattern repeats every 32/g codes, which fill bits/g words: packing takes a
fixed number of elementwise passes with static shifts, unpacking reads two neighboring words a code,
or where no code lies in two, all codes of a word at once.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _rows


def words_for(count: int, bits: int) -> int:
    """How many words `count` codes of `bits` bits fill."""
    return -(-count * bits // 32)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Codes uint32[n], each below 2**bits, to words uint32[words_for(n, bits)]."""
    per_group, words_per_group = _group(bits)
    if words_per_group == 1:
        return pack_whole(codes, bits=bits)[0]
    grouped = _rows.rows(codes, per_group)
    columns = [jnp.zeros((grouped.shape[0],), jnp.uint32) for _ in range(words_per_group)]
    for j in range(per_group):
        word, offset = divmod(j * bits, 32)
        code = lax.index_in_dim(grouped, j, axis=1, keepdims=False)
        columns[word] = columns[word] | lax.shift_left(code, np.uint32(offset))
        if offset + bits > 32:
            columns[word + 1] = lax.shift_right_logical(code, np.uint32(32 - offset))
    return jnp.stack(columns, axis=1).ravel()[: words_for(codes.size, bits)]


def pack_whole(*codes: jax.Array, bits: int) -> tuple[jax.Array, ...]:
    """Codes of a width that divides 32, as `pack` does; masks are codes of one bit.

    Those made of the same data are packed together in one pass over it.
    """
    per_word = 32 // bits

    def words(*codes: jax.Array) -> tuple[jax.Array, ...]:
        return _words(bits, *(_rows.rows(c, per_word) for c in codes))

    return _rows.whole_then_rest(words, per_word, *codes)


def _words(bits: int, *rows: jax.Array) -> tuple[jax.Array, ...]:
    shifts = bits * jnp.arange(32 // bits, dtype=jnp.uint32)[None]
    shifted = tuple(row.astype(jnp.uint32) << shifts for row in rows)

    def either(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x | y for x, y in zip(a, b, strict=True))

    # One reduction with several results reads its operand once; several reductions may not.
    zeros = tuple(np.uint32(0) for _ in rows)
    return tuple(lax.reduce(shifted, zeros, either, (1,)))


def unpack(words: jax.Array, bits: int, count: int) -> jax.Array:
    """Words uint32[words_for(count, bits)] back to codes uint32[count]."""
    per_group, words_per_group = _group(bits)
    if words_per_group == 1:
        codes = words[:, None] >> bits * jnp.arange(per_group, dtype=jnp.uint32)[None]
        return codes.ravel()[:count] & jnp.uint32((1 << bits) - 1)
    group, place = np.uint32(per_group), np.uint32(bits)
    j = lax.iota(jnp.uint32, count)
    start = lax.rem(j, group) * place  # inside its group, so that no position in bits overflows
    word = lax.convert_element_type(
        lax.div(j, group) * np.uint32(words_per_group) + (start >> 5), jnp.int32
    )
    offset = start & 31
    code = words[word] >> offset
    rest = words[jnp.minimum(word + 1, words.size - 1)] << (32 - offset & 31)
    code = jnp.where(offset + place > 32, code | rest, code)
    return code & jnp.uint32((1 << bits) - 1)


def period(bits: int) -> int:
    """After how many codes the pattern repeats: the least that fill whole words."""
    return _group(bits)[0]


def _group(bits: int) -> tuple[int, int]:
    common = math.gcd(bits, 32)
    return 32 // common, bits // common
