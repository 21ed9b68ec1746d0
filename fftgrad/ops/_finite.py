"""Whether values are finite, and sums and norms that neither hide that nor overflow.

A maximum is no evidence. XLA for CPUs may drop a NaN from a vectorized `max` or `min`, so a check
that leans on them passes in small tests and fails at real sizes. A sum propagates NaN everywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.ops._shapes import PyTree


def all_finite(tree: object) -> jax.Array:
    """Whether every value of every array is finite, bool[]."""
    # Arrays that are alike share a flag: each reader of the answer finds it again from all flags.
    alike: dict[Any, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        alike.setdefault(jax.typeof(leaf), []).append(leaf)
    flags = [
        jnp.isfinite(poison(jnp.stack(leaves) if len(leaves) > 1 else leaves[0]))
        for leaves in alike.values()
    ]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), bool)


def poison(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Function: 0.0 if all values of `x` are finite, else NaN; of each row if `axis` is given.

    For codecs of one's own. Added to a scale, or to what is sent, it makes a NaN or an infinity
    visible that the codec would hide, because it does not send that value, or clips it.

    Args:
      x: float or complex array of any shape.
      axis: the axis to reduce; None for all of them.

    Shapes: x float[...] | complex[...] -> its real dtype [], or x's shape without `axis`.

    Example:
      >>> fg.codecs.poison(jnp.array([1.0, 2.0])), fg.codecs.poison(jnp.array([1.0, jnp.inf]))
      (Array(0., dtype=float32), Array(nan, dtype=float32))
    """
    # A number less itself is zero, anything else NaN. The sum takes one pass, where XLA for CPUs
    # writes out an array of booleans before it reduces it.
    zeros = x - x
    if jnp.issubdtype(zeros.dtype, jnp.complexfloating):
        zeros = zeros.real + zeros.imag
    return jnp.sum(zeros, axis=axis)


def largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude, or NaN if anything is not finite; of each row if `axis` is given."""
    # No NaN takes part in the maximum.
    top = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=axis)
    return jnp.where(top == jnp.inf, jnp.nan, top)


def mean(x: jax.Array, count: jax.Array | int) -> jax.Array:
    """The sum over a count, no larger than float32 holds; not finite if anything is not."""
    bound = float(jnp.finfo(x.dtype).max)  # rounding may lead beyond it where all are that large
    half = jnp.sum(x * (0.5 / count))
    return jnp.where(jnp.isfinite(half), jnp.clip(2 * half, -bound, bound), half)


def poison_unless(finite: jax.Array) -> jax.Array:
    """0.0 where the flag holds, else NaN."""
    return jnp.where(finite, 0.0, jnp.nan)


def nan_unless(fine: jax.Array, tree: PyTree) -> PyTree:
    """The tree where the flag holds, else NaN throughout."""
    return jax.tree.map(lambda leaf: jnp.where(fine, leaf, jnp.nan), tree)


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
