"""The sharded state in one call."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.training._state_specs import state_specs


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    axis_name: AxisName,
    param_specs: PyTree | None = None,
) -> Any:
    """Function: the state of an optax transformation, sharded over the workers of a mesh.

    It is `tx.init(params)` on every worker, under `jax.shard_map`, with the specs of
    `fg.state_specs`: what each worker has of its own gets one row for each of them. A state that is
    made outside of `shard_map` and passed as replicated has one row for all.

        state = fg.init(tx, params, mesh, "data")
        specs = fg.state_specs(state, "data")
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), ...)

    Args:
      tx: an optax transformation with `compressed_pmean` in it.
      params: the parameters: global arrays, or arrays of each process, on its host or on devices
        of its own, that are equal on all processes; JAX raises where they differ.
      mesh: the mesh of the training step, with axes of type Auto or Explicit.
      axis_name: the axis, or axes, of the workers.
      param_specs: the parameters' own PartitionSpecs, in a tree like theirs; all replicated if
        left out.

    Returns:
      The state, of global arrays.

    Raises:
      ValueError: if there is no state of `compressed_pmean` in it, if the mesh does not have the
        axis, or if a parameter is sharded over it.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> state = fg.init(tx, {"w": jnp.zeros((3, 4))}, mesh, "data")
      >>> state.memory.value.residual["w"].shape == (jax.device_count(), 3, 4)
      True
    """
    missing = set(_axes.names(axis_name)) - set(mesh.axis_names)
    if missing:
        raise ValueError(
            f"init(axis_name): must be an axis of the mesh, got {axis_name!r} for a mesh with "
            f"{mesh.axis_names}; use one of these."
        )
    specs = state_specs(jax.eval_shape(tx.init, params), axis_name, param_specs)
    ins = PartitionSpec() if param_specs is None else param_specs
    if mesh.is_multi_process:
        params = jax.tree.map(_to_host, params)
    placed = jax.device_put(
        params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), ins, is_leaf=_is_spec)
    )
    make = jax.shard_map(tx.init, mesh=mesh, in_specs=(ins,), out_specs=specs)
    return jax.jit(make)(placed)


def _to_host(leaf: Any) -> Any:
    """What only this process has, as a value: JAX moves no array to devices of other processes."""
    is_own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    return jax.device_get(leaf) if is_own else leaf


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
