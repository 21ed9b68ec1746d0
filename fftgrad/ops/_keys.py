"""PRNG keys of any kind."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._values import plain


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
