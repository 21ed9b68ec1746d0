"""The training step of one worker, mapped over a mesh and compiled."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check
from fftgrad.training._state import has_ours, state_specs


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    *,
    param_specs: PyTree | None = None,
    check_vma: bool = True,
    donate_argnums: int | tuple[int, ...] = (),
) -> jax.stages.Wrapped:
    """Function: compile the step of one worker and run it on all workers of a mesh.

    It is `jax.jit(jax.shard_map(step, ...))` with the specs of `fg.state_specs`:

        def step(params, state, x, y):  # x and y are the rows of one worker
            value, grads = fg.value_and_grad(loss, "data")(params, x, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

        train = fg.data_parallel(step, mesh, "data")
        params, state, value = train(params, state, x, y)  # global arrays

    The first arguments are carried from step to step: (params, state), one Flax `TrainState`, or
    (params, statistics of BatchNorm, state). The argument with the state of `compressed_pmean` is
    the last of them. If `fg.state_specs` shards a leaf, each worker gets its rows of the leaf, else
    the whole leaf. The remaining arguments are the batch, which is split over its leading axis.
    `step` returns the carried values in the same order. Any further results, such as a mean loss,
    must be equal on all workers.

    If the mesh has other axes and you pass `param_specs`, all axes are manual, and a step sees its
    shard of each parameter. Without `param_specs`, only the axis of the workers is manual. A step
    then sees whole parameters, and the parameters keep their sharding. But if the axis of the
    workers is Auto and the others are Explicit, JAX returns the parameters unsharded.

    Args:
      step: a function (*carried, *batch) -> (*carried, *others) of one worker.
      mesh: the mesh, with axes of type Auto or Explicit. Arguments are resharded if necessary.
      axis_name: the axis, or axes, of the workers.
      param_specs: the PartitionSpecs of the parameters, in a tree like theirs. A step with
        collectives over other axes needs them; pass P() if all parameters are replicated.
      check_vma: True if `shard_map` checks which values are replicated.
      donate_argnums: the arguments whose buffers the results may reuse, as for `jax.jit`: (0, 1)
        for params and state.

    Returns:
      A compiled function of global arrays. It compiles again if the sharding of an argument
      changes. To avoid that, put the parameters on the mesh before the first step:
      `jax.device_put(params, NamedSharding(mesh, P()))`.

    Raises:
      ValueError: if the mesh lacks the axis; while tracing, if no argument holds the state of
        `compressed_pmean`, if the state does not have one row for each worker, or if `step` does
        not return all carried values. JAX raises an error if the number of workers does not divide
        the batch, and if it finds that results differ between the workers.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllReduce(), axis_name="data")
      >>> def step(w, state, x):
      ...     grad, state = tx.update(jnp.mean(x, axis=0), state, w)
      ...     return w - grad, state
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> w, x = jnp.zeros(3), jnp.ones((2 * jax.device_count(), 3))
      >>> train = fg.data_parallel(step, mesh, "data")
      >>> w, state = train(w, fg.init_state(tx, w, mesh, "data"), x)
      >>> w.tolist(), int(state.step)
      ([-1.0, -1.0, -1.0], 1)
    """
    _axes.check_names("data_parallel(axis_name)", axis_name)
    _axes.check_mesh("data_parallel(axis_name)", mesh, axis_name)
    rows = PartitionSpec(axis_name)
    manual = mesh.axis_names if param_specs is not None else _axes.names(axis_name)

    def run(*args: Any) -> tuple[Any, ...]:
        count = next((i for i, arg in enumerate(args, 1) if has_ours(arg)), len(args))
        carried, batch = args[:count], args[count:]
        specs = state_specs(carried, axis_name, param_specs)
        _check_rows(carried, specs, mesh, axis_name)
        scalars = [leaf for leaf in jax.tree.leaves(batch) if not leaf.ndim]
        remedy = "pass arrays that are not split before the state."
        check(not scalars, "data_parallel(batch)", "have rows for the workers", scalars, remedy)

        @functools.wraps(step)
        def worker(carried: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
            out = step(*carried, *batch)
            fine, got = isinstance(out, tuple) and len(out) >= count, type(out).__name__
            rule = f"return a tuple that begins with its first {count} arguments"
            check(fine, "data_parallel(step)", rule, got, "write return params, state, value.")
            return out[:count], out[count:]

        ins, outs = (specs, rows), (specs, PartitionSpec())
        mapped = jax.shard_map(
            worker,
            mesh=mesh,
            in_specs=ins,
            out_specs=outs,
            axis_names=set(manual),
            check_vma=check_vma,
        )
        out, others = mapped(*_axes.place((carried, batch), mesh, ins, manual))
        return *out, *others

    return jax.jit(functools.wraps(step)(run), donate_argnums=donate_argnums)


def _check_rows(carried: PyTree, specs: PyTree, mesh: Mesh, axis_name: AxisName) -> None:
    """Refuse a state that was made for another number of workers."""
    leaves = jax.tree.leaves_with_path(carried)
    specs = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        if not set(_axes.names(axis_name)).isdisjoint(_axes.named(spec)):
            workers = _axes.mesh_size(mesh, spec[0])
            argument = f"data_parallel(arguments{jax.tree_util.keystr(path)})"
            rule = f"have one row for each of {workers} workers"
            remedy = "use fg.init_state(...), or fg.checkpoint.reshard_state from other workers."
            check(leaf.shape[:1] == (workers,), argument, rule, leaf.shape, remedy)
