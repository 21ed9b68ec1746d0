"""How far apart the parameters of workers are."""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.ops import _norms


def consensus_distance(params: PyTree, axis_name: AxisName | None = None) -> jax.Array:
    """Function: how far apart the workers' parameters are, where they differ.

    √(Σ_i ||x_i - x̄||² / w), with x_i all parameters of worker i of w and x̄ their mean: the root
    mean square distance from the mean. It is 0.0 where all are equal, and NaN where one is not
    finite. Beside `||x̄||` it says whether gossip keeps up with training.

    Args:
      params: without `axis_name`, the parameters of all workers, each leaf with a leading axis of
        workers; with it, the worker's own.
      axis_name: the axis, or axes, of the workers, to call it inside them.

    Returns:
      float32[], the same on all workers.

    Wire: with `axis_name`, a dense all-reduce of the parameters and two of 4 bytes: for now and
      then. Without it, what JAX needs to take the mean of a sharded axis.

    Raises:
      ValueError: while tracing, if the axis is not bound.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> rows = {"w": jnp.array([[0.0, 1.0], [2.0, 1.0]])}
      >>> fg.contrib.gossip.consensus_distance(rows).item()
      1.0
      >>> mine = lambda own: fg.contrib.gossip.consensus_distance(own, "data")
      >>> jax.vmap(mine, axis_name="data")(rows).tolist()
      [1.0, 1.0]
    """
    wide = jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), params)
    if axis_name is None:
        workers = next((len(leaf) for leaf in jax.tree.leaves(wide)), 1)
        apart = jax.tree.map(lambda a: a - jnp.mean(a, axis=0, keepdims=True), wide)
        unit = _norms.unit_for(_norms.top(apart))
        return unit * jnp.sqrt(_norms.square(apart, unit) / workers)
    _axes.size(axis_name, "consensus_distance")
    varied = jax.tree.map(lambda a: _axes.vary(a, axis_name), wide)
    apart = jax.tree.map(lambda a: a - lax.pmean(a, axis_name), varied)
    unit = _norms.unit_for(lax.pmax(_norms.top(apart), axis_name))
    unit = _axes.over_other_axes(lax.pmax, unit)
    square = lax.pmean(_norms.square(apart, unit), axis_name)
    return unit * jnp.sqrt(_axes.over_other_axes(lax.psum, square))
