"""The states that count steps, also where a framework has made dicts of named tuples."""

import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check_transformation
from fftgrad.exchanges._shards import OfShards, PerWorker, is_rows
from fftgrad.training._pmean import CompressedPmeanState


class ShardedState(NamedTuple):
    """State of `fg.optimizers.sharded`.

    Attributes:
      step: how many updates there were, int32, equal on all workers.
      skipped: how many of them were left out, because anything was not finite; equal on all.
      memory: of the gradients that each worker could not send.
      inner: the inner optimizer's state, of which each worker has that of its shard.
      ahead: by how much the owner's own parameters differ from what all workers have, float32.
    """

    step: jax.Array
    skipped: jax.Array
    memory: PerWorker
    inner: OfShards
    ahead: OfShards


def is_state(node: Any, *kinds: type) -> bool:
    """Whether a node is a state of a kind, or a dict of one, which may lack what is empty."""
    if isinstance(node, Mapping):
        keys = set(cast("Mapping[Any, Any]", node))
        return any({"step", "skipped"} <= keys <= set(kind.__annotations__) for kind in kinds)
    return isinstance(node, kinds)


def has_ours(tree: PyTree) -> bool:
    """Whether a tree has a state of `compressed_pmean` in it, or rows of workers."""

    def is_ours(node: Any) -> bool:
        return is_rows(node) or is_state(node, CompressedPmeanState)

    return any(map(is_ours, jax.tree.leaves(tree, is_leaf=is_ours)))


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

    It is `tx.init(params)` on every worker, under `jax.shard_map`, with the specs of
    `fg.state_specs`: what each worker has of its own gets a row for each worker.

        state = fg.init_state(tx, params, mesh, "data")
        train = fg.data_parallel(step, mesh, "data")

    A momentum of optax behind error feedback, in a chain, is a `UserWarning`.

    Where a framework keeps the state of the optimizer in one of its own, give it the function that
    makes that: `lambda params: TrainState.create(apply_fn=apply, params=params, tx=tx)`.

    Args:
      tx: an optax transformation with `compressed_pmean` in it, or a function of the parameters
        that makes any state with its state in it.
      params: the parameters: global arrays, or arrays of each process, on its host or on devices
        of its own, that are equal on all processes; JAX raises where they differ.
      mesh: the mesh of the training step, with axes of type Auto or Explicit.
      axis_name: the axis, or axes, of the workers.
      param_specs: the parameters' own PartitionSpecs, in a tree like theirs, where a step has its
        shard of each. Left out where it has whole parameters, as for `data_parallel`: what has the
        path and the shape of a parameter is then sharded as that lies on the mesh.

    Returns:
      The state, of global arrays.

    Raises:
      ValueError: if there is no state of `compressed_pmean` in it, if the mesh does not have the
        axis, or if a parameter is sharded over it.

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
    # What a device has may travel in fewer buckets than the whole.
    pieces = params if param_specs is None else _pieces(params, param_specs, mesh)
    state = jax.eval_shape(make, pieces)
    specs = state_specs(state, axis_name, param_specs)
    if _momentum_follows(state):
        warnings.warn(
            "init_state(tx): a momentum behind error feedback delays each gradient twice: "
            "PowerSGD before Adam ended 11 % above dense, without the momentum where dense did; "
            "use fg.optimizers.feedback_adam, feedback_muon or feedback_sgd in place of both, or "
            "optax.rmsprop behind it. With b1=0.0 there is no momentum: ignore this warning.",
            UserWarning,
            stacklevel=2,
        )
    outs = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    manual, ins, placed, wanted = mesh.axis_names, param_specs, param_specs, outs
    if param_specs is None:
        _refuse_sharded(params, axis_name)
        manual, ins = _axes.names(axis_name), PartitionSpec()
        placed = jax.tree.map(lambda leaf: _spec_of(leaf, mesh), params)
        wanted = _like_params(state, outs, params, placed)
    if mesh.is_multi_process:
        params = jax.tree.map(_to_host, params)
    mapped = jax.shard_map(
        # As a list, because what a framework keeps beside its arrays need not equal itself.
        lambda own: jax.tree.leaves(make(own)),
        mesh=mesh,
        in_specs=(ins,),
        out_specs=outs,
        axis_names=set(manual),
    )
    # Not of all, because some may lie in the memory of the host.
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


def _spec_of(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """How a parameter is sharded over the axes of the mesh."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec())
    return spec if set(_axes.named(spec)) <= set(mesh.axis_names) else PartitionSpec()


def _like_params(
    state: PyTree, specs: list[PartitionSpec], params: PyTree, placed: PyTree
) -> list[PartitionSpec]:
    """The specs, where what has the path and the shape of a parameter is sharded as that is."""
    likes, own = of_params(params), of_params(placed)

    def one(path: tuple[Any, ...], leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        end = param_of(path, own)
        if end is None or jnp.shape(leaf)[len(spec) :] != jnp.shape(likes[end]):
            return spec
        return PartitionSpec(*spec, *own[end])

    leaves = jax.tree.leaves_with_path(state)
    return [one(path, leaf, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)]


def _momentum_follows(state: PyTree) -> bool:
    """Whether a momentum follows a residual in a chain; a whole optimizer has its own."""
    if type(state) is not tuple:
        return False
    late = False
    for part in state:
        fields = {key for path, _ in jax.tree.leaves_with_path(part) for key in path}
        if late and not has_ours(part) and not fields.isdisjoint(MOMENTA):
            return True
        late |= RESIDUAL in fields
    return any(map(_momentum_follows, state))


def _refuse_sharded(params: PyTree, axis_name: AxisName) -> None:
    own = set(_axes.names(axis_name))
    for path, leaf in jax.tree.leaves_with_path(params):
        spec = getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec())
        if not own.isdisjoint(_axes.named(spec)):
            raise ValueError(
                f"init_state(params{jax.tree_util.keystr(path)}): must be whole on every worker "
                "along "
                f"{axis_name!r}, or sharded over other axes, got {spec}; name another axis_name, "
                "because gradients of different parameters have no mean, or gather them in the "
                "loss by fg.optimizers.gather_parameters, and use an optimizer of optax alone."
            )


def _pieces(params: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """The shapes of what one device has of the parameters."""

    def own(spec: PartitionSpec, leaves: PyTree) -> PyTree:
        def piece(leaf: Any) -> jax.ShapeDtypeStruct:
            like = jax.typeof(leaf)
            return jax.ShapeDtypeStruct(
                NamedSharding(mesh, spec).shard_shape(like.shape), like.dtype
            )

        return jax.tree.map(piece, leaves)

    return jax.tree.map(own, specs, params, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _to_host(leaf: Any) -> Any:
    """What only this process has, as a value: JAX moves no array to devices of other processes."""
    is_own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    return jax.device_get(leaf) if is_own else leaf
