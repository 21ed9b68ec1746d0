"""Checks of PRNG keys, and random bits from an integer hash of a counter.

The hash takes a few multiplications per value. A cryptographic generator such as threefry takes
more time than the rest of a codec. Do not use the hash for secrets.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._values import check, check_type, plain


def bits(first: jax.Array, second: jax.Array, count: int) -> jax.Array:
    """Hash two seeds and the position to uint32[count]: value i is h(h(i + first) ^ second).

    For nearby first seeds, h(i + first) are shifted copies. The second hash removes the relation.
    """
    counter = jax.lax.iota(jnp.uint32, count)
    return _mix(_mix(counter + first) ^ second)


def keyed_bits(key: jax.Array, count: int) -> jax.Array:
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return bits(first, second, count)


def drawn_bits(owner: object, key: jax.Array | None, count: int, remedy: str) -> jax.Array:
    """Draw uint32[count] from a key of the step. Raise an error for `owner` if the key is None."""
    remedy = f"pass step=fg.Step.of(key){remedy}."
    check(key is not None, f"{owner!r}(step)", "have a key, to draw from", "no key", remedy)
    return keyed_bits(cast("jax.Array", key), count)


def _mix(x: jax.Array) -> jax.Array:
    """Apply a bijection of uint32. Changing one input bit flips about half of the output bits.

    It has two rounds of xor-shift and multiply, with constants from Wellons' search for low bias.
    """
    x = lax.mul(_fold(x, 16), np.uint32(0x7FEB352D))
    x = lax.mul(_fold(x, 15), np.uint32(0x846CA68B))
    return _fold(x, 16)


def _fold(x: jax.Array, shift: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))


def is_same_under_vmap(key: jax.Array | None) -> bool:
    """Return True if draws from several keys under jax.vmap equal draws without jax.vmap."""
    return key is None or jax.random.key_impl(key) == "threefry2x32"


def as_key(argument: str, key: jax.Array | int) -> jax.Array:
    """Convert a seed, a raw key or a typed key to a typed PRNG key."""
    check_key(argument, key)
    seed: Any = plain(key)
    if isinstance(seed, int) or (not seed.ndim and jnp.issubdtype(seed.dtype, jnp.integer)):
        return jax.random.key(seed)
    is_typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return seed if is_typed else jax.random.wrap_key_data(seed)


def check_key(argument: str, key: Any) -> None:
    """Require a seed or a key. Do not create a key, because that would start the JAX backend.

    JAX itself refuses a batch of keys, and integers that are no key data, when it draws from them.
    """
    remedy = "use key=0, or jax.random.key(0)."
    seed: Any = plain(key)
    if type(seed) is int:
        rule = "be a seed from 0 to 2**32 - 1, the seeds that JAX tells apart"
        check(0 <= seed < 1 << 32, argument, rule, seed, remedy)
        return
    dtype = getattr(seed, "dtype", np.dtype(object))
    is_key = any(jnp.issubdtype(dtype, kind) for kind in (jax.dtypes.prng_key, jnp.integer))
    check_type(is_key, argument, "be a seed or a PRNG key", key, remedy)
