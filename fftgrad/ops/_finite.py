"""Checks for finite values, and means and norms that do not overflow and propagate NaN.

The checks use sums, which always propagate NaN. In large arrays, XLA for CPUs may drop a NaN from
a vectorized `max` or `min`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.ops._shapes import PyTree


def all_finite(tree: object) -> jax.Array:
    # Leaves of equal shape share a flag: XLA combines all flags again for each reader.
    alike: dict[Any, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        alike.setdefault(jax.typeof(leaf), []).append(leaf)
    flags = [
        jnp.isfinite(poison(jnp.stack(leaves) if len(leaves) > 1 else leaves[0]))
        for leaves in alike.values()
    ]
    if not flags:
        return jnp.ones((), bool)
    # Without the barrier, XLA turns this into one `and` per flag, which each reader repeats.
    return jnp.all(lax.optimization_barrier(jnp.stack(flags)))


def poison(x: jax.Array) -> jax.Array:
    """Function: 0.0 if all values of `x` are finite, else NaN.

    Use this function in a codec that drops or clips values. Add the result to a scale, or to the
    payload, so that a NaN or an infinity is not lost.

    Args:
      x: float or complex array of any shape.

    Shapes: x float[...] | complex[...] -> its real dtype [].

    Example:
      >>> fg.codecs.poison(jnp.array([1.0, 2.0])), fg.codecs.poison(jnp.array([1.0, jnp.inf]))
      (Array(0., dtype=float32), Array(nan, dtype=float32))
    """
    # x - x is 0 for finite x and NaN otherwise. A sum takes one pass, but XLA for CPUs stores an
    # array of booleans before it reduces the array.
    zeros = x - x
    if jnp.issubdtype(zeros.dtype, jnp.complexfloating):
        zeros = zeros.real + zeros.imag
    return jnp.sum(zeros)


def largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the largest magnitude along `axis`, or of all values; NaN if a value is not finite."""
    # Replace NaN by infinity, because a maximum may drop NaN.
    top = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=axis)
    return jnp.where(top == jnp.inf, jnp.nan, top)


def mean(x: jax.Array, count: jax.Array | int) -> jax.Array:
    """Return sum / count without overflow. If a value is not finite, the result is not finite."""
    bound = float(jnp.finfo(x.dtype).max)  # a rounded mean of the largest values may exceed it
    half = jnp.sum(x * (0.5 / count))
    return jnp.where(jnp.isfinite(half), jnp.clip(2 * half, -bound, bound), half)


def poison_unless(finite: jax.Array) -> jax.Array:
    return jnp.where(finite, 0.0, jnp.nan)


def nan_unless(fine: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(fine, leaf, jnp.nan), tree)


def top(tree: PyTree) -> jax.Array:
    """Return the largest magnitude. It may miss a NaN, but `square` does not."""
    tops = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return jnp.max(jnp.stack(tops)) if tops else jnp.zeros((), jnp.float32)


def unit_for(top: jax.Array) -> jax.Array:
    """Return the largest power of two <= `top`, within 2^-126 ... 2^126."""
    # The upper limit is 2^126, because XLA multiplies by 1 / unit, which must be a normal number.
    bits = lax.bitcast_convert_type(top, jnp.uint32) & jnp.uint32(0x7F800000)
    bits = jnp.clip(bits, jnp.uint32(1 << 23), jnp.uint32(253 << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def square(tree: PyTree, unit: jax.Array) -> jax.Array:
    leaves = jax.tree.leaves(tree)
    return sum((jnp.sum(jnp.square(leaf / unit)) for leaf in leaves), jnp.zeros((), jnp.float32))
