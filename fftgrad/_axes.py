"""Named axes under shard_map (with or without check_vma), pmap and vmap.

Under `shard_map(check_vma=True)` the type of each value has the mesh axes along which the value
varies ("tracked"). Otherwise types have no such axes.
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
"""A mesh axis, or several axes that act as one."""


def names(axis_name: AxisName) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def check_names(argument: str, axis_name: object) -> None:
    several: tuple[object, ...] = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not several or not all(isinstance(name, str) for name in several):
        rule = "must be an axis name or a tuple of names"
        raise TypeError(f"{argument}: {rule}, got {axis_name!r}; use 'data', or ('slow', 'fast').")


def check_mesh(argument: str, mesh: Mesh, axis_name: AxisName) -> None:
    if not set(names(axis_name)) <= set(mesh.axis_names):
        got = f"got {axis_name!r} for a mesh with {mesh.axis_names}"
        raise ValueError(f"{argument}: must be an axis of the mesh, {got}; use one of these.")


def mesh_size(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    return math.prod(mesh.shape[name] for name in names(axis_name))


def size(axis_name: AxisName, owner: str = "compressed_pmean") -> int:
    """Return the number of workers along a bound axis."""
    try:
        return math.prod(int(lax.axis_size(name)) for name in names(axis_name))
    except NameError as error:
        raise ValueError(
            f"{owner}(axis_name={axis_name!r}): the axis must be bound where it is called, got no "
            f"such axis; make the step by fg.data_parallel, or call it inside jax.shard_map, "
            f"jax.pmap or jax.vmap with this axis."
        ) from error


def is_tracked(axis_name: AxisName) -> bool:
    """Return True if JAX tracks which values vary along the axis."""
    return bool(varying(lax.axis_index(axis_name)))


def varies(x: jax.Array, axis_name: AxisName) -> bool:
    """Return True if `x` may differ between the workers; True if JAX does not track the axis."""
    return not is_tracked(axis_name) or set(names(axis_name)) <= varying(x)


def beside(x: jax.Array, axis_name: AxisName) -> frozenset[str]:
    """Return the other mesh axes along which `x` may vary.

    If JAX does not track this, return all manual axes of more than one device.
    """
    if is_tracked(axis_name):
        return varying(x).difference(names(axis_name))
    mesh = jax.sharding.get_abstract_mesh()
    several = (axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)
    return frozenset(several).difference(names(axis_name))


def half_reduced(x: jax.Array) -> frozenset[str]:
    """Return the axes that the type of `x` marks as unreduced or reduced."""
    kind = jax.typeof(x)
    manual, spec = kind.manual_axis_type, kind.sharding.spec
    return frozenset(manual.unreduced | manual.reduced | spec.unreduced | spec.reduced)


def is_unreduced(x: object, axis_name: AxisName) -> bool:
    """Return True if the type of a global array says that its sum over the axis is pending."""
    spec = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else PartitionSpec()
    kind = getattr(spec, "unreduced_kind", None)  # since jax 0.12 it may be a maximum
    return set(names(axis_name)) <= spec.unreduced and getattr(kind, "name", "sum") == "sum"


def vary(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Type `x` as varying along a tracked axis, so that JAX does not sum its gradient over it."""
    if not is_tracked(axis_name):
        return x
    missing = tuple(name for name in names(axis_name) if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Stack the values of all workers in the workers' order, typed as equal on all workers."""
    if is_tracked(axis_name):
        return lax.all_gather(x, axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def vary_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Type `x` as varying along every axis along which `other` varies."""
    missing = tuple(sorted(varying(other) - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def over_other_axes(
    reduce: Callable[[jax.Array, tuple[str, ...]], jax.Array],
    x: jax.Array,
    but: tuple[str, ...] = (),
) -> jax.Array:
    """Reduce `x` over the axes along which it is known to vary, except those of `but`.

    A mean over the data axis may still vary along a model axis. But decisions and counts that
    depend on this mean must be equal on the whole mesh, because they are stored replicated.
    """
    axes = tuple(sorted(varying(x).difference(but)))
    return reduce(x, axes) if axes else x


def everywhere(flag: jax.Array, but: tuple[str, ...] = ()) -> jax.Array:
    """Combine a flag bool[] by AND over the axes along which it varies, except those of `but`."""
    return over_other_axes(lax.pmin, flag.astype(jnp.int32), but) > 0


def check_workers(owner: str, workers: int, axis_name: AxisName) -> None:
    if workers != (found := size(axis_name)):
        rule = f"must be the size of the axis {axis_name!r}, {found} workers"
        raise ValueError(f"{owner}(workers): {rule}, got {workers}; use workers={found}.")


def varying(x: jax.Array) -> frozenset[str]:
    """Return the axes along which `x` is known to vary."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def named(spec: PartitionSpec) -> Iterator[str]:
    """Yield the axes that a PartitionSpec names."""
    for entry in spec:
        yield from (entry,) if isinstance(entry, str) else entry or ()


def place(tree: Any, mesh: Mesh, specs: Any, axes: tuple[str, ...]) -> Any:
    """Reshard arrays by their specs over those of `axes` that are Explicit.

    `shard_map` itself reshards over Auto axes. Over Explicit axes that are not in `axes`, the
    arrays keep their sharding.
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

    put_all = lambda spec, leaves: jax.tree.map(functools.partial(put, spec), leaves)  # noqa: E731
    return jax.tree.map(put_all, specs, tree)


def whole(tree: Any) -> Any:
    """Replicate arrays along the Auto axes, which XLA partitions.

    Otherwise XLA partitions a codec and adds collectives to its searches and scatters. The CPU
    backend cannot run some of these collectives.
    """
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return tree
    return lax.with_sharding_constraint(tree, PartitionSpec())


def without_explicit(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `update(updates, state, ...)`, so that it runs with Auto axes in place of Explicit axes.

    A codec flattens and cuts arrays, and with an Explicit axis each piece would need a sharding.
    The results have the types of the arguments.
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
    """Return the spec without unreduced and reduced axes."""
    if hasattr(spec, "partitions"):
        return PartitionSpec(*spec.partitions)
    none: frozenset[str] = frozenset()  # jax 0.10.0; later versions have more arguments
    return spec.update(unreduced=none, reduced=none)
