"""How to shard a state that differs between workers."""

from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.exchanges._per_worker import is_rows
from fftgrad.training._pmean import CompressedPmeanState
from fftgrad.training._states import has_ours, is_state


def state_specs(
    opt_state: PyTree, axis_name: AxisName, param_specs: PyTree | None = None
) -> PyTree:
    """Function: the PartitionSpecs of an optimizer state that holds `compressed_pmean`'s.

    What each worker has of its own, such as the residual of error feedback, is sharded over the
    leading axis of workers; everything else is replicated. Where the parameters are sharded over
    other axes of the mesh, the state follows them: what has the path of a parameter at the end of
    its own, such as Adam's moments or a residual, is sharded as the parameter is, and what an
    exchange keeps of its buckets, or Adafactor of rows, has one piece for each shard.

    The state may be part of a larger one, such as Flax's `TrainState`, whose parameters are then
    sharded by `param_specs`, and its named tuples may have become dicts, as in `nnx.state`: there a
    dict of which `worker_rows` is the only key is what each worker has of its own.

    Args:
      opt_state: any state with that of `compressed_pmean` in it, nested as it may be, or its shapes
        (`jax.eval_shape(tx.init, params)`).
      axis_name: the axis, or axes, of the workers.
      param_specs: the parameters' own PartitionSpecs, in a tree like theirs; all replicated if
        left out.

    Returns:
      The same tree with a `jax.sharding.PartitionSpec` at each leaf: for the `in_specs` and
      `out_specs` of `jax.shard_map`, or, under a mesh, for `jax.sharding.NamedSharding`.

    Raises:
      ValueError: if there is no state of `compressed_pmean` in it, or if a parameter is sharded
        over the axis of the workers.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> state = jax.eval_shape(tx.init, {"w": jnp.zeros((3, 4))})
      >>> tuple(fg.state_specs(state, "data").memory.worker_rows.residual["w"])
      ('data',)
      >>> specs = fg.state_specs(state, "data", {"w": jax.sharding.PartitionSpec(None, "model")})
      >>> tuple(specs.memory.worker_rows.residual["w"]), tuple(specs.step)
      (('data', None, 'model'), ())
    """
    _axes.check_names("state_specs(axis_name)", axis_name)
    if not has_ours(opt_state):
        raise ValueError(
            "state_specs(opt_state): must have the state of compressed_pmean in it, got a "
            f"{type(opt_state).__name__} without; pass fg.init_state(tx, params, mesh, axis_name) "
            "or "
            "jax.eval_shape(tx.init, params), of a tx with compressed_pmean in it."
        )
    by_path = of_params(param_specs)
    workers = _axes.names(axis_name)
    own = axis_name if isinstance(axis_name, str) else workers
    for path, param_spec in by_path.items():
        if not set(workers).isdisjoint(_axes.named(param_spec)):
            raise ValueError(
                f"state_specs(param_specs{''.join(path)}): must not shard a parameter over the "
                f"axis of the exchange, got {param_spec} for {axis_name!r}: the mean would be one "
                "of gradients of different parameters; shard it over another axis of the mesh, or "
                "gather it in the loss by fg.optimizers.gather_parameters, with an optimizer of "
                "optax alone."
            )
    others = tuple(dict.fromkeys(name for spec in by_path.values() for name in _axes.named(spec)))

    def like_params(path: tuple[Any, ...], node: Any) -> PartitionSpec:
        end = param_of(path, by_path)
        if end is not None and len(by_path[end]) <= jnp.ndim(node):
            return by_path[end]
        # Of fewer axes than a parameter: made of each shard, as the rows of Adafactor.
        return of_mesh(node) if end else PartitionSpec()

    def own_like_params(path: tuple[Any, ...], node: Any) -> PartitionSpec:
        end = param_of(path, by_path)
        if end is not None and len(by_path[end]) < jnp.ndim(node):
            return PartitionSpec(own, *by_path[end])
        return of_worker(node)

    def of_mesh(node: Any) -> PartitionSpec:
        return PartitionSpec(others) if others and jnp.ndim(node) else PartitionSpec()

    def of_worker(_: Any) -> PartitionSpec:
        return PartitionSpec((*workers, *others) if others else own)

    def of_exchange(node: Any) -> PyTree:
        # Its arrays belong to buckets. A path in it that ends like that of a parameter, as list
        # positions do, means something else.
        return jax.tree.map(of_worker if is_rows(node) else of_mesh, node)

    def of_pmean(fields: Mapping[str, Any]) -> dict[str, PyTree]:
        specs = {name: jax.tree.map(lambda _: PartitionSpec(), fields[name]) for name in fields}
        if "memory" in fields:
            specs["memory"] = jax.tree_util.tree_map_with_path(own_like_params, fields["memory"])
        if "exchange" in fields:
            specs["exchange"] = jax.tree.map(of_exchange, fields["exchange"], is_leaf=is_rows)
        if "worker" in fields:
            specs["worker"] = jax.tree.map(lambda _: PartitionSpec(own), fields["worker"])
        return specs

    def spec(path: tuple[Any, ...], node: Any) -> PyTree:
        if isinstance(node, CompressedPmeanState):
            return CompressedPmeanState(**of_pmean(node._asdict()))
        if is_state(node, CompressedPmeanState):
            return type(node)(of_pmean(node))
        if is_rows(node):
            return jax.tree_util.tree_map_with_path(
                lambda inner, leaf: own_like_params(path + inner, leaf), node
            )
        return like_params(path, node)

    return jax.tree_util.tree_map_with_path(
        spec,
        opt_state,
        is_leaf=lambda node: is_state(node, CompressedPmeanState) or is_rows(node),
    )


Path: TypeAlias = tuple[str, ...]
"""The keys on the way to a leaf, as text."""


def of_params(tree: PyTree) -> dict[Path, Any]:
    """What there is of each parameter, such as its PartitionSpec, by its path."""
    pairs = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return {tuple(map(str, path)): leaf for path, leaf in pairs}


def param_of(path: tuple[Any, ...], params: Container[Path]) -> Path | None:
    """The longest path of a parameter that ends the path of a leaf."""
    names = tuple(map(str, path))
    ends = (names[start:] for start in range(len(names) + 1))
    return next((end for end in ends if end in params), None)
