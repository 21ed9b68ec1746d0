"""A vector as rows of equal length.

Padding a whole vector costs a bound check at every value, which keeps the pass over it from being
vectorized. So most callers treat the values that fill whole rows first, and pad only the rest.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Encode = Callable[..., tuple[jax.Array, ...]]


def whole_then_rest(encode: Encode, group: int, *vectors: jax.Array) -> tuple[jax.Array, ...]:
    """`encode(*vectors)`, run once on the values that fill whole groups and once on the rest.

    The results are joined end to end.
    """
    size = vectors[0].size
    whole = size - size % group
    if whole in (0, size):
        return encode(*vectors)
    head, rest = encode(*(v[:whole] for v in vectors)), encode(*(v[whole:] for v in vectors))
    return tuple(jnp.concatenate(both) for both in zip(head, rest, strict=True))


def rows(vector: jax.Array, length: int) -> jax.Array:
    """The vector in rows of that length, the last one filled with zeros."""
    missing = -vector.size % length
    if missing:
        vector = lax.pad(vector, vector.dtype.type(0), ((0, missing, 0),))
    return lax.reshape(vector, (vector.size // length, length))
