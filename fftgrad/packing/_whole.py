"""Whole groups first: what is cut into groups without padding all of it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Encode = Callable[..., tuple[jax.Array, ...]]


def then_rest(encode: Encode, group: int, *vectors: jax.Array) -> tuple[jax.Array, ...]:
    """`encode(*vectors)`, of as many values as fill whole groups and of the rest, end to end.

    Only the rest is then padded: a bound to check at every value would keep the pass over all of
    them from being vectorized.
    """
    size = vectors[0].size
    whole = size - size % group
    if whole in (0, size):
        return encode(*vectors)
    head, rest = encode(*(v[:whole] for v in vectors)), encode(*(v[whole:] for v in vectors))
    return tuple(jnp.concatenate(both) for both in zip(head, rest, strict=True))


def rows(vector: jax.Array, length: int) -> jax.Array:
    """The vector in rows of that length, the last one filled with zeros."""
    return jnp.pad(vector, (0, -vector.size % length)).reshape(-1, length)
