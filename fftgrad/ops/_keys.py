"""PRNG keys of any kind."""

import jax
import jax.numpy as jnp
import numpy as np


def is_same_under_vmap(key: jax.Array | None) -> bool:
    """Whether jax.vmap draws with each of several keys what each draws on its own."""
    return key is None or jax.random.key_impl(key) == "threefry2x32"


def as_key(key: jax.Array | int) -> jax.Array:
    """A typed PRNG key from a seed, a raw key or a typed key."""
    check_key("random(key)", key)
    if isinstance(key, int):
        return jax.random.key(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key) if key.ndim else jax.random.key(key)


def check_key(argument: str, key: object) -> None:
    """Refuses what no key is made of; makes none, because that starts the backend."""
    dtype = getattr(key, "dtype", np.dtype(type(key) if isinstance(key, int) else object))
    if not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(
            f"{argument}: must be a seed or a PRNG key, got {key!r}; use key=0, or "
            "jax.random.key(0)."
        )
