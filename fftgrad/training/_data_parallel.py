"""A worker's step as the step of all workers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
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
    """Function: the step of one worker, run by all workers of a mesh and compiled.

    It is `jax.jit(jax.shard_map(step, ...))` with the specs of `fg.state_specs`:

        def step(params, state, x, y):  # of one worker: its own rows of x and y
            value, grads = fg.value_and_grad(loss, "data")(params, x, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

        train = fg.data_parallel(step, mesh, "data")
        params, state, value = train(params, state, x, y)  # of all workers

    The arguments up to the one that holds the state of `compressed_pmean` are carried from step to
    step: (params, state), or one `TrainState`, or (params, statistics, state). A worker gets its
    rows of what `fg.state_specs` shards, and all of the rest. The arguments after them are the
    batch, split over the leading axis. `step` returns what is carried, in the same order, and then
    whatever else is the same on all workers, such as a mean loss.

    On a mesh with more axes than those of the workers, `param_specs` makes all of them
    `shard_map`'s, and a step has its shard of each parameter. Without, the others are XLA's and
    have to be of type Auto: a step has whole parameters, and these stay sharded as they are.

    Args:
      step: a function (*carried, *batch) -> (*carried, *others) of one worker.
      mesh: the mesh, with axes of type Auto or Explicit. Over Explicit ones the arguments are
        resharded where they lie otherwise.
      axis_name: the axis, or axes, of the workers.
      param_specs: the parameters' own PartitionSpecs, in a tree like theirs; P() for parameters
        that are replicated over other axes whose collectives a step calls.
      check_vma: whether `shard_map` checks what is replicated.
      donate_argnums: the arguments whose buffers the results may take, as of `jax.jit`: (0, 1) for
        params and state.

    Returns:
      A function of global arrays, as `jax.jit` returns it. Like all of these it compiles again for
      arguments that lie elsewhere: parameters that are put on the mesh before the first step, by
      `jax.device_put(params, NamedSharding(mesh, P()))`, save it once.

    Raises:
      ValueError: if the mesh does not have the axis, or, without `param_specs`, has Explicit axes
        beside Auto ones of the workers; while tracing, if no argument has the state of
        `compressed_pmean` in it, the state has no row for each worker, the workers cannot share the
        batch evenly, or `step` returns less than it carries. JAX refuses results that differ
        between the workers.

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
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    beside = {kinds[name] for name in kinds if name not in manual}
    # JAX then returns whole what is sharded over the Explicit ones.
    if AxisType.Explicit in beside and AxisType.Auto in {kinds[name] for name in manual}:
        raise ValueError(
            "data_parallel(mesh): must not have Explicit axes beside Auto axes of the workers "
            f"without param_specs, got {kinds}; make the mesh with axis_types=(AxisType.Auto,) * "
            f"{len(kinds)}, or give param_specs, P() for parameters that are replicated."
        )

    def run(*args: Any) -> tuple[Any, ...]:
        count = _count_carried(args)
        carried, batch = args[:count], args[count:]
        specs = state_specs(carried, axis_name, param_specs)
        _check_rows(carried, batch, specs, mesh, axis_name)

        @functools.wraps(step)
        def worker(carried: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
            out = step(*carried, *batch)
            if not isinstance(out, tuple) or len(out) < count:
                raise ValueError(
                    f"data_parallel(step): must return a tuple of its first {count} arguments and "
                    f"what else there is, got {type(out).__name__}; write return params, state, "
                    "value."
                )
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


def _count_carried(args: tuple[Any, ...]) -> int:
    """How many arguments there are up to that with the state of `compressed_pmean` in it."""
    for count, arg in enumerate(args, 1):
        if has_ours(arg):
            return count
    raise ValueError(
        "data_parallel(step): one of its arguments must have the state of compressed_pmean in it, "
        f"got {len(args)} without; call it as train(params, state, *batch), with "
        "state = fg.init_state(tx, params, mesh, axis_name)."
    )


def _check_rows(carried: PyTree, batch: PyTree, specs: PyTree, mesh: Mesh, axis: AxisName) -> None:
    """Refuse a state without a row for each worker, and a batch that they cannot share evenly."""
    workers = _axes.mesh_size(mesh, axis)
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    leaves = jax.tree.leaves_with_path(carried)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        own = not set(_axes.names(axis)).isdisjoint(_axes.named(spec))
        if own and (not leaf.ndim or leaf.shape[0] != _axes.mesh_size(mesh, spec[0])):
            raise ValueError(
                f"data_parallel(arguments{jax.tree_util.keystr(path)}): must have one row for each "
                f"of the {workers} workers, got {list(leaf.shape)}; make the state by "
                "fg.init_state(tx, params, mesh, axis_name)."
            )
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not leaf.ndim or leaf.shape[0] % workers:
            raise ValueError(
                f"data_parallel(batch{jax.tree_util.keystr(path)}): must have a leading axis that "
                f"{workers} workers share evenly, got {list(leaf.shape)}; give what all of them "
                "need whole before the state, and return it."
            )
