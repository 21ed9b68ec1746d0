"""Integers of 1 to 32 bits, end to end in uint32 words.

Code j occupies bits [j·bits, (j+1)·bits) of the stream, least significant first. With
g = gcd(bits, 32), the pattern repeats every 32/g codes, which fill bits/g words: packing takes a
fixed number of elementwise passes with static shifts, unpacking reads two neighboring words a code.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def words_for(count: int, bits: int) -> int:
    """How many words `count` codes of `bits` bits fill."""
    return -(-count * bits // 32)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Codes uint32[n], each below 2**bits, to words uint32[words_for(n, bits)]."""
    per_group, words_per_group = _group(bits)
    if words_per_group == 1:
        return _pack_whole(codes, bits, per_group)
    grouped = jnp.pad(codes, (0, -codes.size % per_group)).reshape(-1, per_group)
    columns = [jnp.zeros((grouped.shape[0],), jnp.uint32) for _ in range(words_per_group)]
    for j in range(per_group):
        word, offset = divmod(j * bits, 32)
        code = grouped[:, j]
        columns[word] = columns[word] | (code << offset)
        if offset + bits > 32:
            columns[word + 1] = columns[word + 1] | (code >> (32 - offset))
    return jnp.stack(columns, axis=1).ravel()[: words_for(codes.size, bits)]


def _pack_whole(codes: jax.Array, bits: int, per_word: int) -> jax.Array:
    """Where a word holds whole codes: a reduction, which is vectorized, over each word's."""
    shifts = bits * jnp.arange(per_word, dtype=jnp.uint32)[None]

    def words(rows: jax.Array) -> jax.Array:
        return lax.reduce(rows << shifts, np.uint32(0), jnp.bitwise_or, (1,))

    # Padded on its own, as in `_bitmap.pack`.
    whole = codes.size - codes.size % per_word
    head = words(codes[:whole].reshape(whole // per_word, per_word))
    if whole == codes.size:
        return head
    end = jnp.pad(codes[whole:], (0, -codes.size % per_word))
    return jnp.concatenate([head, words(end.reshape(1, per_word))])


def unpack(words: jax.Array, bits: int, count: int) -> jax.Array:
    """Words uint32[words_for(count, bits)] back to codes uint32[count]."""
    per_group, words_per_group = _group(bits)
    j = jax.lax.iota(jnp.int32, count)
    start = j % per_group * bits  # inside its group, so that no position in bits overflows
    word = j // per_group * words_per_group + start // 32
    offset = (start % 32).astype(jnp.uint32)
    code = words[word] >> offset
    if 32 % bits:
        rest = words[jnp.minimum(word + 1, words.size - 1)] << (-offset % 32)
        code = jnp.where(offset + bits > 32, code | rest, code)
    return code & jnp.uint32((1 << bits) - 1)


def _group(bits: int) -> tuple[int, int]:
    common = math.gcd(bits, 32)
    return 32 // common, bits // common
