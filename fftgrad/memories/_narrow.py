"""What a memory keeps in two bytes a value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree
from fftgrad.ops import _hash, _rounding


class NarrowState(NamedTuple):
    """State: a residual in bfloat16.

    Attributes:
      residual: what earlier steps could not send, shaped like the gradient.
      rounds: how often it was rounded, int32[]: after each, other draws.
    """

    residual: PyTree
    rounds: jax.Array


def zeros(like: PyTree) -> NarrowState:
    """The state before the first step."""
    residual = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), like)
    return NarrowState(residual, jnp.zeros((), jnp.int32))


def keep(residual: PyTree, rounds: jax.Array) -> NarrowState:
    """The state of a float32 residual, rounded up or down by chance."""
    (seed,) = _hash.bits(rounds.astype(jnp.uint32), jnp.uint32(0), 1)

    def one(x: jax.Array) -> jax.Array:
        flat = x.ravel()
        # By their bits as well, or leaves and workers would round alike at the same positions.
        own = seed ^ jax.lax.bitcast_convert_type(flat, jnp.uint32)
        draws = _hash.bits(jnp.uint32(0), own, x.size)
        return _rounding.to_bfloat16(flat, draws).reshape(x.shape)

    return NarrowState(jax.tree.map(one, residual), rounds + 1)
