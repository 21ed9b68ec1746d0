"""PRNG keys of any kind, and random bits by position: a counter through an integer hash.

A few multiplications a value, where a cryptographic generator such as threefry takes dozens of
rounds, more than all the rest of a codec. Statistically tested; not for secrets.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._values import plain


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


def is_same_under_vmap(key: jax.Array | None) -> bool:
    """Whether jax.vmap draws with each of several keys what each draws on its own."""
    return key is None or jax.random.key_impl(key) == "threefry2x32"


def as_key(argument: str, key: jax.Array | int) -> jax.Array:
    """Make a typed PRNG key from a seed, a raw key or a typed key."""
    check_key(argument, key)
    seed: Any = plain(key)
    if isinstance(seed, int) or (not seed.ndim and jnp.issubdtype(seed.dtype, jnp.integer)):
        return jax.random.key(seed)
    is_typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return seed if is_typed else jax.random.wrap_key_data(seed)


def check_key(argument: str, key: Any) -> None:
    """Refuse what is no seed and no key; make no key, because that starts the backend."""
    remedy = "use key=0, or jax.random.key(0)."
    seed: Any = plain(key)
    if type(seed) is int:
        if not 0 <= seed < 1 << 32:
            raise ValueError(
                f"{argument}: must be a seed from 0 to 2**32 - 1, because JAX draws with any other "
                f"as with one of these, got {seed}; {remedy}"
            )
        return
    dtype = getattr(seed, "dtype", np.dtype(object))
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (is_typed or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{argument}: must be a seed or a PRNG key, got {key!r}; {remedy}")
    if seed.ndim and (is_typed or not _is_raw_key(seed)):
        raise ValueError(
            f"{argument}: must be one seed or one PRNG key, got an array of {dtype} of shape "
            f"{seed.shape}; pass one of a batch of keys, as keys[0]."
        )


def _is_raw_key(key: Any) -> bool:
    like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return (key.shape, key.dtype) == (like.shape, like.dtype)
