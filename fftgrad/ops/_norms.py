"""Sums of squares that neither overflow nor vanish: in units of the largest magnitude.

The unit is a power of two, so that dividing by it rounds nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.ops._shapes import PyTree


def top(tree: PyTree) -> jax.Array:
    """The largest magnitude. It may miss a NaN, which the squares then show."""
    tops = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return jnp.max(jnp.stack(tops)) if tops else jnp.zeros((), jnp.float32)


def unit_for(top: jax.Array) -> jax.Array:
    """The largest power of two that is no more than `top`, within 2^-126 ... 2^126."""
    # No larger, because XLA divides by multiplying with 1 / unit, which has to be a normal number.
    bits = lax.bitcast_convert_type(top, jnp.uint32) & jnp.uint32(0x7F800000)
    bits = jnp.clip(bits, jnp.uint32(1 << 23), jnp.uint32(253 << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def square(tree: PyTree, unit: jax.Array) -> jax.Array:
    """The sum of the squares of all values, each divided by the unit."""
    leaves = jax.tree.leaves(tree)
    return sum((jnp.sum(jnp.square(leaf / unit)) for leaf in leaves), jnp.zeros((), jnp.float32))
