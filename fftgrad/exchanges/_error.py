"""What a step lost, over all workers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.ops import _norms


def relative_error(lost: PyTree, x: PyTree, axis_name: AxisName) -> jax.Array:
    """√(Σ ||lost_i||² / Σ ||x_i||²) over the workers i; 0 where all is zero.

    12 bytes a worker, in two all-reduces.
    """

    def everywhere(
        reduce: Callable[[jax.Array, AxisName], jax.Array], values: jax.Array
    ) -> jax.Array:
        return _axes.over_other_axes(reduce, reduce(values, axis_name))

    unit = _norms.unit_for(everywhere(lax.pmax, _norms.top(x)))
    squares = jnp.stack([_norms.square(lost, unit), _norms.square(x, unit)])
    lost_square, square = everywhere(lax.psum, squares)
    return jnp.sqrt(lost_square / jnp.where(square > 0, square, 1.0))
