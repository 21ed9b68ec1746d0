"""A worker's step as the step of all workers."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check_choice
from fftgrad.training import _find
from fftgrad.training._check_step import check_result, check_rows, check_shares, say_differs
from fftgrad.training._state_specs import state_specs

By = Literal["shard_map", "vmap"]


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    *,
    by: By = "shard_map",
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

    `by="vmap"` is `jax.vmap(step, spmd_axis_name=axis_name)` under `jax.jit`, without `shard_map`:
    XLA's partitioner places the workers. Four things are worse there: both sides of a `lax.cond`
    that depends on the worker are computed; JAX cannot gather over several axes at once, as
    `AllGather` does; each turn of a loop that depends on the worker sends one byte; and XLA gathers
    what it cannot split: a convolution in the loss, whose inputs and outputs then travel dense,
    the places that a `Budget` takes, and before jax 0.12 an `Fft` of blocks above 64. `fg.audit`
    shows what travels.

    Args:
      step: a function (*carried, *batch) -> (*carried, *others) of one worker.
      mesh: the mesh, with axes of type Auto or Explicit. On an Explicit one the arguments are
        resharded where they lie otherwise, and `by="vmap"` makes its axes Auto inside of `step`.
      axis_name: the axis, or axes, of the workers.
      by: "shard_map", or "vmap".
      param_specs: the parameters' own PartitionSpecs, in a tree like theirs; all replicated if left
        out. Not with `by="vmap"`.
      check_vma: whether `shard_map` checks what is replicated.
      donate_argnums: the arguments whose buffers the results may take, as of `jax.jit`: (0, 1) for
        params and state.

    Returns:
      A function of global arrays, as `jax.jit` returns it. Like all of these it compiles again for
      arguments that lie elsewhere: parameters that are put on the mesh before the first step, by
      `jax.device_put(params, NamedSharding(mesh, P()))`, save it once.

    Raises:
      ValueError: if the mesh does not have the axis, or with `param_specs` and `by="vmap"`. While
        tracing: if no argument has the state of `compressed_pmean` in it, if the workers cannot
        share a batch evenly, if what `step` returns is not what it carries, or if JAX knows that it
        differs between the workers.

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
    check_choice("data_parallel(by)", by, get_args(By))
    if by == "vmap" and param_specs is not None:
        raise ValueError(
            "data_parallel(param_specs): must be left out with by='vmap', where the gradient is "
            f"gathered over the other axes before it is compressed, got {param_specs}; use "
            "by='shard_map'."
        )
    workers = _axes.mesh_size(mesh, axis_name)
    rows = PartitionSpec(axis_name)

    def run(*args: Any) -> tuple[Any, ...]:
        count = _count_carried(args)
        carried, batch = args[:count], args[count:]
        check_shares(batch, workers, axis_name)
        # A list, because a tuple may be a chain of transformations.
        specs = tuple(state_specs(list(carried), axis_name, param_specs))
        check_rows(carried, specs, mesh, axis_name)

        @functools.wraps(step)
        def worker(carried: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
            out = step(*carried, *batch)
            check_result(out, carried, specs, axis_name)
            return out[:count], out[count:]

        ins, outs = (specs, rows), (specs, PartitionSpec())
        if by == "vmap":
            mapped = _axes.auto(_by_vmap(worker, mesh, axis_name, specs), mesh, ins, outs)
        else:
            mapped = jax.shard_map(
                worker, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma
            )
        out, others = mapped(*_axes.place((carried, batch), mesh, ins))
        return *out, *others

    return jax.jit(functools.wraps(step)(run), donate_argnums=donate_argnums)


def _by_vmap(
    worker: Callable[..., Any], mesh: Mesh, axis_name: AxisName, specs: PyTree
) -> Callable[..., Any]:
    """The step of all workers, by a jax.vmap for each axis."""
    names = _axes.names(axis_name)
    sizes = tuple(mesh.shape[name] for name in names)
    workers = _axes.mesh_size(mesh, axis_name)
    axes = jax.tree.map(lambda spec: 0 if len(spec) else None, specs, is_leaf=_is_spec)

    def split(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(*sizes, leaf.shape[0] // workers, *leaf.shape[1:])

    def merge(leaf: jax.Array) -> jax.Array:
        rows, *others = leaf.shape[len(sizes) :]
        return leaf.reshape(workers * rows, *others)

    def where_own(change: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda spec, leaf: change(leaf) if len(spec) else leaf, specs, tree, is_leaf=_is_spec
        )

    mapped = worker
    for name in reversed(names):
        mapped = jax.vmap(
            mapped, in_axes=(axes, 0), out_axes=(axes, None), axis_name=name, spmd_axis_name=name
        )

    def run(carried: PyTree, batch: PyTree) -> Any:
        try:
            out, others = mapped(where_own(split, carried), jax.tree.map(split, batch))
        except ValueError as error:
            if "out_axes is None" in str(error):
                raise ValueError(say_differs("a result", axis_name)) from error
            raise
        return where_own(merge, out), others

    return run


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _count_carried(args: tuple[Any, ...]) -> int:
    """How many arguments there are up to that with the state of `compressed_pmean` in it."""
    for count, arg in enumerate(args, 1):
        if any(map(_find.is_ours, jax.tree.leaves(arg, is_leaf=_find.is_ours))):
            return count
    raise ValueError(
        "data_parallel(step): one of its arguments must have the state of compressed_pmean in it, "
        f"got {len(args)} without; call it as train(params, state, *batch), with "
        "state = fg.init_state(tx, params, mesh, axis_name)."
    )
