"""What a step lost, over all workers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree


def relative_error(lost: PyTree, x: PyTree, axis_name: AxisName) -> jax.Array:
    """√(Σ ||lost_i||² / Σ ||x_i||²) over the workers i; 0 where all is zero.

    12 bytes a worker, in two all-reduces.
    """

    def everywhere(
        reduce: Callable[[jax.Array, AxisName], jax.Array], values: jax.Array
    ) -> jax.Array:
        return _axes.over_other_axes(reduce, reduce(values, axis_name))

    tops = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(x)]
    # The squares are in units of the largest magnitude of all, so that none overflows or vanishes.
    # A maximum that misses a NaN does no harm: such a step is skipped.
    unit = _power_of_two(everywhere(lax.pmax, jnp.max(jnp.stack(tops))))
    squares = jnp.stack([_square(lost, unit), _square(x, unit)])
    lost_square, square = everywhere(lax.psum, squares)
    return jnp.sqrt(lost_square / jnp.where(square > 0, square, 1.0))


def _power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two that is no more than x, and at least 2^-126."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    return lax.bitcast_convert_type(jnp.maximum(bits, jnp.uint32(1 << 23)), jnp.float32)


def _square(tree: PyTree, unit: jax.Array) -> jax.Array:
    # Twice by its root, because 1 / unit may be too small for a normal number.
    half = jax.lax.rsqrt(unit)
    leaves = jax.tree.leaves(tree)
    return sum((jnp.sum(jnp.square(leaf * half * half)) for leaf in leaves), jnp.zeros(()))
