"""Named axes: all that differs between shard_map (checked or not), pmap and vmap.

Under `shard_map(check_vma=True)` JAX types each value by the mesh axes along which it varies.
Everywhere else nothing is tracked, and every value looks as if it varied along no axis.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AxisName: TypeAlias = str | tuple[str, ...]
"""One mesh axis, or several that act as one."""


def names(axis_name: AxisName) -> tuple[str, ...]:
    """The axis names as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def check_names(argument: str, axis_name: object) -> None:
    """Refuses what is neither an axis nor a tuple of axes, such as a list."""
    several: tuple[object, ...] = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not several or not all(isinstance(name, str) for name in several):
        remedy = "'data', or ('slow', 'fast')"
        if isinstance(axis_name, list) and axis_name:
            remedy = repr(axis_name[0] if len(axis_name) == 1 else tuple(axis_name))
        raise TypeError(
            f"{argument}: must be the name of an axis, or a tuple of names, got {axis_name!r}; use "
            f"{remedy}."
        )


def check_mesh(argument: str, mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses an axis that the mesh does not have."""
    if not set(names(axis_name)) <= set(mesh.axis_names):
        raise ValueError(
            f"{argument}: must be an axis of the mesh, got {axis_name!r} for a mesh with "
            f"{mesh.axis_names}; use one of these."
        )


def mesh_size(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """The number of workers along the axis of a mesh."""
    return math.prod(mesh.shape[name] for name in names(axis_name))


def size(axis_name: AxisName, owner: str = "compressed_pmean") -> int:
    """The number of workers along the axis."""
    try:
        return math.prod(int(lax.axis_size(name)) for name in names(axis_name))
    except NameError as error:
        raise ValueError(
            f"{owner}(axis_name={axis_name!r}): the axis must be bound where it is called, got no "
            f"such axis; make the step by fg.data_parallel, or call it inside jax.shard_map over a "
            f"mesh that has the axis, or inside jax.pmap or jax.vmap with axis_name={axis_name!r}."
        ) from error


def index(axis_name: AxisName) -> jax.Array:
    """The number of this worker along the axis."""
    return lax.axis_index(axis_name)


def is_tracked(axis_name: AxisName) -> bool:
    """Whether JAX knows which values vary along the axis."""
    return bool(varying(lax.axis_index(axis_name)))


def varies(x: jax.Array, axis_name: AxisName) -> bool:
    """Whether `x` may differ between the workers of the axis, as far as JAX knows."""
    return not is_tracked(axis_name) or set(names(axis_name)) <= varying(x)


def known_to_vary(x: object, axis_name: AxisName) -> bool:
    """Whether JAX knows that `x` differs between the workers of the axis, or of a part of it."""
    return isinstance(x, jax.Array) and not varying(x).isdisjoint(names(axis_name))


def beside(x: jax.Array, axis_name: AxisName) -> frozenset[str]:
    """The other axes of the mesh along which `x` may vary: any, where JAX does not track that."""
    if is_tracked(axis_name):
        return varying(x).difference(names(axis_name))
    mesh = jax.sharding.get_abstract_mesh()
    several = (axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)
    return frozenset(several).difference(names(axis_name))


def half_reduced(x: jax.Array) -> frozenset[str]:
    """The axes over which JAX types `x` as unreduced or reduced: a sum to come, and its dual."""
    kind = jax.typeof(x)
    manual, spec = kind.manual_axis_type, kind.sharding.spec
    return frozenset(manual.unreduced | manual.reduced | spec.unreduced | spec.reduced)


def is_unreduced(x: object, axis_name: AxisName) -> bool:
    """Whether the type of a global array says that it is a sum over the axis, yet to be taken."""
    spec = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else PartitionSpec()
    kind = getattr(spec, "unreduced_kind", None)  # since jax 0.12 it may be a maximum
    return set(names(axis_name)) <= spec.unreduced and getattr(kind, "name", "sum") == "sum"


def vary(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x`, typed as varying along the axis where JAX knows; its gradient is then a worker's own."""
    if not is_tracked(axis_name):
        return x
    missing = tuple(name for name in names(axis_name) if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The values of all workers, stacked in their order, and known to be equal on all."""
    if is_tracked(axis_name):
        return lax.all_gather(x, axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Row i of x[w, ...] to worker i; the rows that all have for this one, in their order."""
    return lax.all_to_all(x, axis_name, 0, 0)


def permute(x: jax.Array, axis_name: AxisName, sources: tuple[int, ...]) -> jax.Array:
    """What worker sources[i] has, to worker i, for every i."""
    pairs = [(source, i) for i, source in enumerate(sources)]
    return lax.ppermute(x, axis_name, pairs)


def vary_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x`, typed as varying along every axis along which `other` varies: for loop carries."""
    missing = tuple(sorted(varying(other) - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def over_other_axes(
    reduce: Callable[[jax.Array, tuple[str, ...]], jax.Array],
    x: jax.Array,
    but: tuple[str, ...] = (),
) -> jax.Array:
    """`x`, reduced over the axes along which it is known to vary, but for some.

    A mean over the data axis may still vary along a model axis. What is decided or counted from it
    is replicated over the whole mesh, so it has to be made the same there too.
    """
    axes = tuple(sorted(varying(x).difference(but)))
    return reduce(x, axes) if axes else x


def everywhere(flag: jax.Array, but: tuple[str, ...] = ()) -> jax.Array:
    """Whether the flag, bool[], holds along all axes along which it is known to vary, but some."""
    return over_other_axes(lax.pmin, flag.astype(jnp.int32), but) > 0


def check_workers(owner: str, workers: int, axis_name: AxisName) -> None:
    """Refuses an axis of another size than what was configured for it."""
    found = size(axis_name)
    if found != workers:
        raise ValueError(
            f"{owner}(workers): must be the size of the axis, got {workers} for {found} workers "
            f"along {axis_name!r}; use workers={found}."
        )


def varying(x: jax.Array) -> frozenset[str]:
    """The axes along which `x` is known to vary."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The shardings of a tree of PartitionSpecs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def named(spec: PartitionSpec) -> Iterator[str]:
    """The axes that a PartitionSpec names."""
    for entry in spec:
        yield from (entry,) if isinstance(entry, str) else entry or ()


def place(tree: Any, mesh: Mesh, specs: Any, axes: tuple[str, ...]) -> Any:
    """Reshard the arrays as the specs say, over those of `axes` that are Explicit.

    Over Auto axes `shard_map` does it by itself. Over other Explicit axes the arrays stay sharded
    as their types say.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if explicit.isdisjoint(axes):
        return tree

    def put(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
        entries = itertools.zip_longest(spec, jax.typeof(leaf).sharding.spec)
        wanted = [
            tuple(name for name in named(PartitionSpec(new)) if name in explicit)
            + tuple(name for name in named(PartitionSpec(old)) if name in explicit.difference(axes))
            for new, old in entries
        ]
        return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*wanted)))

    return jax.tree.map(
        lambda spec, leaves: jax.tree.map(functools.partial(put, spec), leaves),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def whole(tree: Any) -> Any:
    """The arrays, whole on every device along the axes that XLA has in its hands.

    Left to itself its partitioner cuts a codec into pieces, with a collective for each search and
    each scatter in it, some of which no CPU can run.
    """
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return tree
    return lax.with_sharding_constraint(tree, PartitionSpec())


def without_explicit(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update(updates, state, ...)`, inside of which the axes that shard_map leaves are Auto.

    A codec flattens and cuts, and an Explicit axis wants to be told where each piece is to lie. The
    results are of the types of the arguments.
    """

    def run(
        updates: Any,
        state: Any,
        params: Any = None,
        value: Any = None,
        weight: Any = None,
        **extra: Any,
    ) -> Any:
        numbers = {"value": value, "weight": weight}
        given = {name: number for name, number in numbers.items() if number is not None}
        mesh = jax.sharding.get_abstract_mesh()
        if not (mesh.manual_axes and mesh.explicit_axes):
            return update(updates, state, params, **given, **extra)
        auto: Any = jax.sharding.auto_axes(
            lambda u, s, p, given: update(u, s, p, **given, **extra),
            axes=tuple(mesh.explicit_axes),
            out_sharding=jax.tree.map(lambda a: jax.typeof(a).sharding, (updates, state)),
        )
        return auto(updates, state, params, given)

    return run


def summed(spec: PartitionSpec) -> PartitionSpec:
    """The same of what is neither unreduced nor reduced."""
    if hasattr(spec, "partitions"):
        return PartitionSpec(*spec.partitions)
    none: frozenset[str] = frozenset()  # jax 0.10.0; later ones also ask for the kind of sum
    return spec.update(unreduced=none, reduced=none)
