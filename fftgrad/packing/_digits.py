"""Digits of any base, as many in a uint32 word as fit: 20 of base 3, 1.6 bits each.

Words of digits add digit by digit as long as no digit reaches the base: packed small integers
can travel through a sum.
"""

import jax
import jax.numpy as jnp
import numpy as np


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
    rows = jnp.pad(digits, (0, -digits.size % width)).reshape(-1, width)
    return jnp.sum(rows * _powers(base)[None], axis=1, dtype=jnp.uint32)


def unpack(words: jax.Array, base: int, count: int) -> jax.Array:
    """Words back to digits uint32[count]."""
    return ((words[:, None] // _powers(base)[None]) % jnp.uint32(base)).ravel()[:count]


def _powers(base: int) -> np.ndarray:
    return np.array([base**j for j in range(per_word(base))], np.uint32)
