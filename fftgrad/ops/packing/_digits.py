"""Digits of any base, as many in a uint32 word as fit: 20 of base 3, 1.6 bits each.

Words of digits add digit by digit as long as no digit reaches the base: packed small integers
can travel through a sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _platform, _rows

PIECE = 1 << 16


def per_word(base: int) -> int:
    """How many digits a word holds."""
    count = 1
    while base ** (count + 1) <= 1 << 32:
        count += 1
    return count


def words_for(count: int, base: int) -> int:
    """How many words `count` digits fill."""
    return -(-count // per_word(base))


def pack(digits: jax.Array, base: int) -> jax.Array:
    """Digits uint32[n], each below `base`, to words uint32[words_for(n, base)]."""
    width = per_word(base)

    def words(digits: jax.Array) -> tuple[jax.Array]:
        values = _rows.rows(digits, width) * _powers(base)[None]
        return (jnp.sum(values, axis=1, dtype=jnp.uint32),)

    return _rows.whole_then_rest(words, width, digits)[0]


def unpack(words: jax.Array, base: int, count: int) -> jax.Array:
    """Words back to digits uint32[count]."""
    if per_word(base) == 1:
        return words[:count]
    digits = _platform.dependent(
        words,
        cpu=functools.partial(_digits_in_pieces, base=base),
        default=functools.partial(_digits, base=base),
    )
    return digits.ravel()[:count]


def _digits_in_pieces(words: jax.Array, base: int) -> jax.Array:
    # In pieces, which are kept before the unused digits are cut off: found together with that,
    # a digit would be looked for by its position, and not with its neighbors.
    pieces = _rows.rows(words, max(1, min(PIECE, words.size)))
    digits = lax.map(functools.partial(_digits, base=base), pieces)
    return digits.reshape(-1, per_word(base))[: words.size]


def _digits(words: jax.Array, base: int) -> jax.Array:
    """All digits of words uint32[m], uint32[m, per_word(base)].

    A word is divided once, into halves that a float32 holds exactly, as division of integers is not
    vectorized. One half more before rounding down is too little to reach the next digit, and more
    than all rounding errors.
    """
    width = per_word(base)
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


def _powers(base: int) -> np.ndarray:
    return np.array([base**j for j in range(per_word(base))], np.uint32)
