"""State that differs between workers, and how to shard it."""

from collections.abc import Iterator
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


def state_specs(
    opt_state: PyTree, axis_name: AxisName, param_specs: PyTree | None = None
) -> PyTree:
    """Function: the PartitionSpecs of an optimizer state that holds `compressed_pmean`'s.

    What each worker has of its own, such as the residual of error feedback, is sharded over the
    leading axis of workers; everything else is replicated. Where the parameters are sharded over
    other axes of the mesh, the state follows them: what has the path of a parameter at the end of
    its own, such as Adam's moments or a residual, is sharded as the parameter is, and what an
    exchange keeps of its vectors has one piece for each shard.

    Args:
      opt_state: any optax state, nested as it may be, or its shapes (`jax.eval_shape(tx.init,
        params)`).
      axis_name: the axis, or axes, of the workers.
      param_specs: the parameters' own PartitionSpecs, in a tree like theirs; all replicated if
        left out.

    Returns:
      The same tree with a `jax.sharding.PartitionSpec` at each leaf: for the `in_specs` and
      `out_specs` of `jax.shard_map`, or, under a mesh, for `jax.sharding.NamedSharding`.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> state = jax.eval_shape(tx.init, {"w": jnp.zeros((3, 4))})
      >>> tuple(fg.state_specs(state, "data").memory.value.residual["w"])
      ('data',)
      >>> specs = fg.state_specs(state, "data", {"w": jax.sharding.PartitionSpec(None, "model")})
      >>> tuple(specs.memory.value.residual["w"]), tuple(specs.step)
      (('data', None, 'model'), ())
    """
    by_path = {
        tuple(map(str, path)): spec
        for path, spec in jax.tree.leaves_with_path(
            param_specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
    }
    workers = _axes.names(axis_name)
    own = axis_name if isinstance(axis_name, str) else workers
    others = tuple(dict.fromkeys(name for spec in by_path.values() for name in _named(spec)))

    def of_param(path: tuple[Any, ...]) -> PartitionSpec | None:
        names = tuple(map(str, path))
        ends = (names[start:] for start in range(len(names) + 1))
        return next((by_path[end] for end in ends if end in by_path), None)

    def of_worker(path: tuple[Any, ...]) -> PartitionSpec:
        param = of_param(path)
        if param is not None:
            return PartitionSpec(own, *param)
        return PartitionSpec((*workers, *others) if others else own)

    def spec(path: tuple[Any, ...], node: Any) -> PyTree:
        if isinstance(node, PerWorker):
            return jax.tree_util.tree_map_with_path(lambda inner, _: of_worker(path + inner), node)
        param = of_param(path)
        if param is not None and len(param) <= jnp.ndim(node):
            return param
        return PartitionSpec(others) if others and jnp.ndim(node) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(
        spec, opt_state, is_leaf=lambda node: isinstance(node, PerWorker)
    )


def _named(spec: PartitionSpec) -> Iterator[str]:
    """The axes that a PartitionSpec names."""
    for entry in spec:
        if isinstance(entry, str):
            yield entry
        elif entry is not None:
            yield from entry
