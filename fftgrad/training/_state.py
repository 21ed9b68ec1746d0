"""Optimizer states: their PartitionSpecs, and their initialization on a mesh."""

import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check, check_transformation
from fftgrad.exchanges._shards import PerWorker, is_rows
from fftgrad.training._pmean import CompressedPmeanState


class ShardedState(NamedTuple):
    """State of `fg.optimizers.sharded`.

    Attributes:
      step: number of updates, int32, equal on all workers.
      skipped: number of updates in which a value was not finite; equal on all workers.
      memory: state of the memory, one for each worker.
      inner: state of the inner optimizer, sharded over the workers.
      ahead: each owner's float32 parameters minus the replicated parameters, sharded.
    """

    step: jax.Array
    skipped: jax.Array
    memory: PerWorker
    inner: PerWorker
    ahead: PerWorker


def is_state(node: Any, *kinds: type) -> bool:
    """Return True if a node is a state of one of the kinds, or a dict of its non-empty fields."""
    if isinstance(node, Mapping):
        keys = set(cast("Mapping[Any, Any]", node))
        return any({"step", "skipped"} <= keys <= set(kind.__annotations__) for kind in kinds)
    return isinstance(node, kinds)


def has_ours(tree: PyTree) -> bool:
    """Return True if a tree holds a state of `compressed_pmean`, or a `PerWorker`."""

    def is_ours(node: Any) -> bool:
        return is_rows(node) or is_state(node, CompressedPmeanState)

    return any(map(is_ours, jax.tree.leaves(tree, is_leaf=is_ours)))


def state_specs(
    opt_state: PyTree, axis_name: AxisName, param_specs: PyTree | None = None
) -> PyTree:
    """Function: the PartitionSpecs of an optimizer state that contains `compressed_pmean`.

    Leaves that differ between workers, such as the residual of error feedback, are sharded over
    their leading axis of workers. All other leaves are replicated, unless `param_specs` shards
    parameters over other mesh axes. Then a leaf whose path ends with the path of a parameter, such
    as a moment or a residual, is sharded like this parameter. Arrays of an exchange, and leaves
    with fewer axes than the parameter, such as the rows of Adafactor, have a piece for each shard.

    The parameters in a larger state, such as Flax's `TrainState`, get `param_specs`. Named tuples
    may be dicts, as in `nnx.state`. A dict whose only key is `worker_rows` is sharded over the
    workers.

    Args:
      opt_state: a state that contains the state of `compressed_pmean` at any depth, or the shapes
        of such a state (`jax.eval_shape(tx.init, params)`).
      axis_name: the axis, or axes, of the workers.
      param_specs: the PartitionSpecs of the parameters, in a tree like theirs; None if all are
        replicated.

    Returns:
      The same tree with a `jax.sharding.PartitionSpec` at each leaf, for the `in_specs` and
      `out_specs` of `jax.shard_map`, or for `jax.sharding.NamedSharding`.

    Raises:
      ValueError: if `opt_state` does not contain the state of `compressed_pmean`, or if a parameter
        is sharded over the axis of the workers.

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
            "state_specs(opt_state): must hold the state of compressed_pmean, got a "
            f"{type(opt_state).__name__} without; pass fg.init_state(tx, params, mesh, axis_name) "
            "or jax.eval_shape(tx.init, params)."
        )
    by_path = of_params(param_specs)
    workers = _axes.names(axis_name)
    own = axis_name if isinstance(axis_name, str) else workers
    _refuse_sharded("state_specs(param_specs", by_path, axis_name)
    others = tuple(dict.fromkeys(name for spec in by_path.values() for name in _axes.named(spec)))

    def like_params(path: tuple[Any, ...], node: Any) -> PartitionSpec:
        end = param_of(path, by_path)
        if end is not None and len(by_path[end]) <= jnp.ndim(node):
            return by_path[end]
        # Each shard has its own leaf with fewer axes than the parameter, as the rows of Adafactor.
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
        # Arrays of an exchange belong to buckets, even if their paths end with a parameter's path.
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
"""The keys from the root to a leaf, as text."""


def of_params(tree: PyTree) -> dict[Path, Any]:
    """Map the path of each parameter to its leaf, such as its PartitionSpec."""
    pairs = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return {tuple(map(str, path)): leaf for path, leaf in pairs}


def param_of(path: tuple[Any, ...], params: Container[Path]) -> Path | None:
    """Return the longest parameter path with which the path of a leaf ends, or None."""
    names = tuple(map(str, path))
    ends = (names[start:] for start in range(len(names) + 1))
    return next((end for end in ends if end in params), None)


RESIDUAL = jax.tree_util.GetAttrKey("residual")
MOMENTA = {jax.tree_util.GetAttrKey("mu"), jax.tree_util.GetAttrKey("trace")}


def init_state(
    tx: optax.GradientTransformation | Callable[[Any], Any],
    params: optax.Params,
    mesh: Mesh,
    axis_name: AxisName,
    param_specs: PyTree | None = None,
) -> Any:
    """Function: the state of an optax transformation, sharded over the workers of a mesh.

    It runs `tx.init(params)` on every worker, under `jax.shard_map`, with the specs of
    `fg.state_specs`. Leaves that differ between workers get one row for each worker.

        state = fg.init_state(tx, params, mesh, "data")
        train = fg.data_parallel(step, mesh, "data")

    It warns (`UserWarning`) about an optax momentum behind error feedback.

    If a framework's state contains the optimizer state, pass a function that makes the framework's
    state: `lambda params: TrainState.create(apply_fn=apply, params=params, tx=tx)`.

    Args:
      tx: an optax transformation that contains `compressed_pmean` or an optimizer of ours; or a
        function that takes the parameters and returns a state that contains the state of one.
      params: the parameters, as global arrays, or as arrays on the host or devices of each process.
        All processes must pass equal values; JAX raises an error if they differ.
      mesh: the mesh of the training step, with axes of type Auto or Explicit.
      axis_name: the axis, or axes, of the workers.
      param_specs: the same value as for `data_parallel`. Without it, a step sees whole parameters,
        and a state leaf with the path and shape of a parameter has the parameter's sharding over
        the other mesh axes.

    Returns:
      The state, as global arrays.

    Raises:
      ValueError: if the state does not contain such a state, if the mesh lacks
        the axis, or if a parameter is sharded over the axis.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> state = fg.init_state(tx, {"w": jnp.zeros((3, 4))}, mesh, "data")
      >>> state.memory.worker_rows.residual["w"].shape == (jax.device_count(), 3, 4)
      True
    """
    _axes.check_mesh("init_state(axis_name)", mesh, axis_name)
    if not callable(tx):
        check_transformation("init_state(tx)", tx)
    make: Any = getattr(tx, "init", tx)
    # The shards of the parameters on one device may need fewer buckets than whole parameters.
    pieces = params if param_specs is None else _pieces(params, param_specs, mesh)
    state = jax.eval_shape(make, pieces)
    specs = state_specs(state, axis_name, param_specs)
    if _momentum_follows(state):
        warnings.warn(
            "init_state(tx): must not chain a momentum behind error feedback, got one, which "
            "delays each gradient twice and raised the final loss of PowerSGD with Adam by 11 %; "
            "use fg.optimizers.feedback_adam or feedback_muon for both. Ignore this "
            "warning if b1=0.0.",
            UserWarning,
            stacklevel=2,
        )
    outs = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    manual, ins, placed, wanted = mesh.axis_names, param_specs, param_specs, outs
    if param_specs is None:
        manual, ins = _axes.names(axis_name), PartitionSpec()
        placed = jax.tree.map(_spec_of, params)
        _refuse_sharded("init_state(params", of_params(placed), axis_name)
        in_mesh = lambda spec: set(_axes.named(spec)) <= set(mesh.axis_names)  # noqa: E731
        placed = jax.tree.map(lambda spec: spec if in_mesh(spec) else PartitionSpec(), placed)
        wanted = _like_params(state, outs, params, placed)
    if mesh.is_multi_process:
        params = jax.tree.map(_to_host, params)
    mapped = jax.shard_map(
        # A list, because the static data of a framework's state need not compare equal.
        lambda own: jax.tree.leaves(make(own)),
        mesh=mesh,
        in_specs=(ins,),
        out_specs=outs,
        axis_names=set(manual),
    )
    # Place only leaves whose specs change, because other leaves may be in host memory.
    changed = [new if new != old else None for new, old in zip(wanted, outs, strict=True)]
    put = lambda leaf, spec: (  # noqa: E731
        leaf if spec is None else _axes.place(leaf, mesh, spec, mesh.axis_names)
    )
    run = jax.jit(
        lambda own: list(map(put, mapped(own), changed)),
        out_shardings=_axes.shardings(mesh, changed),
    )
    leaves = run(jax.device_put(params, _axes.shardings(mesh, placed)))
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _spec_of(leaf: Any) -> PartitionSpec:
    return getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec())


def _like_params(
    state: PyTree, specs: list[PartitionSpec], params: PyTree, placed: PyTree
) -> list[PartitionSpec]:
    """If a leaf has the path and shape of a parameter, append the parameter's spec to its spec."""
    likes, own = of_params(params), of_params(placed)

    def one(path: tuple[Any, ...], leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        end = param_of(path, own)
        if end is None or jnp.shape(leaf)[len(spec) :] != jnp.shape(likes[end]):
            return spec
        return PartitionSpec(*spec, *own[end])

    leaves = jax.tree.leaves_with_path(state)
    return [one(path, leaf, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)]


def _momentum_follows(state: PyTree) -> bool:
    """Detect a momentum after a residual in the state of `optax.chain`, which is a tuple."""
    if type(state) is not tuple:
        return False
    late = False
    for part in state:
        fields = {key for path, _ in jax.tree.leaves_with_path(part) for key in path}
        if late and not has_ours(part) and not fields.isdisjoint(MOMENTA):
            return True
        late |= RESIDUAL in fields
    return any(map(_momentum_follows, state))


def _refuse_sharded(argument: str, specs: Mapping[Path, Any], axis_name: AxisName) -> None:
    own, rule = set(_axes.names(axis_name)), f"be whole along {axis_name!r}, that of the workers"
    remedy = "shard it over another axis of the mesh, or use fg.optimizers.gather_parameters."
    for path, spec in specs.items():
        fine = own.isdisjoint(_axes.named(spec))
        check(fine, f"{argument}{''.join(path)})", rule, spec, remedy)


def _pieces(params: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Return the shapes of one device's shards of the parameters."""

    def own(spec: PartitionSpec, leaves: PyTree) -> PyTree:
        def piece(leaf: Any) -> jax.ShapeDtypeStruct:
            like = jax.typeof(leaf)
            return jax.ShapeDtypeStruct(
                NamedSharding(mesh, spec).shard_shape(like.shape), like.dtype
            )

        return jax.tree.map(piece, leaves)

    return jax.tree.map(own, specs, params, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _to_host(leaf: Any) -> Any:
    """Copy arrays of this process to the host; JAX cannot move them to other processes' devices."""
    is_own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    return jax.device_get(leaf) if is_own else leaf
