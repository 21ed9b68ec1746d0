"""Random bits by position: a counter through an integer hash.

A few multiplications a value, where a cryptographic generator such as threefry takes dozens of
rounds, more than all the rest of a codec. Statistically tested; not for secrets.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def bits(first: jax.Array, second: jax.Array, count: int) -> jax.Array:
    """uint32[count] that two seeds and the position decide: value i is h(h(i + first) ^ second).

    A stream whose first seed is near another's is a shift of that before the second hash only.
    """
    counter = jax.lax.iota(jnp.uint32, count)
    return _mix(_mix(counter + first) ^ second)


def keyed_bits(key: jax.Array, count: int) -> jax.Array:
    """uint32[count] from a PRNG key: other values for another key, step or worker folded in."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return bits(first, second, count)


def drawn_bits(owner: object, key: jax.Array | None, count: int, remedy: str) -> jax.Array:
    """Those of a key of the step, which the owner needs."""
    if key is None:
        raise ValueError(
            f"{owner!r}(step): draws by chance, got a step without a key; pass "
            f"step=fg.Step.of(key){remedy}."
        )
    return keyed_bits(key, count)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that changes half of the bits for each bit changed.

    Two rounds of xor-shift and multiply, with constants from Wellons' search for low bias.
    """
    x = lax.mul(_fold(x, 16), np.uint32(0x7FEB352D))
    x = lax.mul(_fold(x, 15), np.uint32(0x846CA68B))
    return _fold(x, 16)


def _fold(x: jax.Array, shift: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))
