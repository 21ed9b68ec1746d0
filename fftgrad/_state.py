"""State that differs between workers, and how to shard it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fftgrad import _axes
from fftgrad._base import AxisName, PyTree


class PerWorker(NamedTuple):
    """State: arrays of which each worker has its own, under a leading axis of workers.

    Inside the axis that leading axis has length 1; the global array, sharded over it, has one row
    a worker. It is thus an ordinary array to save, restore and reshard.
    """

    value: PyTree


def add_worker_axis(value: PyTree) -> PerWorker:
    """One worker's own state as its row of the global one."""
    return PerWorker(jax.tree.map(lambda a: jnp.asarray(a)[None], value))


def drop_worker_axis(state: PerWorker) -> PyTree:
    """The inverse of `add_worker_axis`, inside the axis."""
    for path, leaf in jax.tree.leaves_with_path(state.value):
        if leaf.shape[0] != 1:
            raise ValueError(
                f"compressed_pmean(state{jax.tree_util.keystr(path)}): inside the axis the leading "
                f"worker axis must have length 1, got {leaf.shape[0]}; shard the state with "
                "fg.state_specs(opt_state, axis_name) as its in_specs and out_specs."
            )
    return jax.tree.map(lambda a: a[0], state.value)


def state_specs(opt_state: PyTree, axis_name: AxisName) -> PyTree:
    """Function: the PartitionSpecs of an optimizer state that holds `compressed_pmean`'s.

    What each worker has of its own, such as the residual of error feedback, is sharded over the
    leading axis of workers; everything else is replicated.

    Args:
      opt_state: any optax state, nested as it may be, or its shapes (`jax.eval_shape(tx.init,
        params)`).
      axis_name: the axis, or axes, of the workers.

    Returns:
      The same tree with a `jax.sharding.PartitionSpec` at each leaf: for the `in_specs` and
      `out_specs` of `jax.shard_map`, or, under a mesh, for `jax.sharding.NamedSharding`.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> specs = fg.state_specs(jax.eval_shape(tx.init, {"w": jnp.zeros(3)}), "data")
      >>> tuple(specs.memory.value.residual["w"]), tuple(specs.step)
      (('data',), ())
    """
    own = PartitionSpec(_axes.names(axis_name) if not isinstance(axis_name, str) else axis_name)

    def spec(node: Any) -> PyTree:
        if isinstance(node, PerWorker):
            return jax.tree.map(lambda _: own, node)
        return PartitionSpec()

    return jax.tree.map(spec, opt_state, is_leaf=lambda node: isinstance(node, PerWorker))
