"""Collectives that a function calls along named axes, found in its jaxpr.

Tracing needs no devices, so the axes may have any size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fftgrad._values import check
from fftgrad.ops import _platform

Axes = Mapping[str, int]
"""Size of each axis by name."""

RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda w: 2 * (w - 1) / w,
    "all-gather": lambda w: w - 1,
    "reduce-scatter": lambda w: (w - 1) / w,
    "all-to-all": lambda w: (w - 1) / w,
    "ragged-all-to-all": lambda w: (w - 1) / w,
    "collective-permute": lambda w: float(w > 1),
    "collective-broadcast": lambda w: (w - 1) / w,
}
"""Link bytes of a worker, divided by the bytes of its array, in a ring of w workers."""

KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


class Collective(NamedTuple):
    """One array that a program hands to a collective.

    Attributes:
      kind: "all-gather", "all-reduce", ...
      dtype: XLA's name of the dtype that is sent, such as "u32" or "f32".
      shape: shape of the array of one worker.
      bytes: size of the array of one worker.
      branch: branch numbers of the conditionals around the collective, outermost first; () if none.
      repeated: True inside a loop; `bytes` then counts one turn.
      workers: number of workers in a group; None if the program has no groups: all workers.
      axes: names of the axes; None for a compiled program, which does not contain them.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    branch: tuple[int, ...]
    repeated: bool
    workers: int | None = None
    axes: tuple[str, ...] | None = None

    def link_bytes(self, workers: int) -> float:
        """Return the bytes that one worker sends over its link, in a ring of `workers`."""
        return self.bytes * RING[self.kind](workers)


def collectives(function: Callable[..., Any], axes: Axes, *likes: Any) -> tuple[Collective, ...]:
    """List the collectives that `function` calls for arguments of these shapes, in order."""
    with _platform.one():
        closed = jax.make_jaxpr(function, axis_env=list(axes.items()))(*likes)
    return tuple(_walk(closed.jaxpr, axes, (), False, {}))


def unconditional(function: Callable[..., Any], axes: Axes, *likes: Any) -> tuple[Collective, ...]:
    """List the collectives of a function; refuse collectives in conditionals or loops."""
    found = collectives(function, axes, *likes)
    same = not any(c.branch or c.repeated for c in found)
    rule, got = "be equal in all steps", "collectives under a condition or in a loop"
    remedy = "give the exchange a wire_bytes and a link_bytes of its own."
    check(same, "link_bytes(...)", rule, got, remedy)
    return found


def _walk(
    jaxpr: core.Jaxpr,
    axes: Axes,
    branch: tuple[int, ...],
    repeated: bool,
    silent: dict[int, core.Jaxpr],
) -> Iterator[Collective]:
    """Yield the collectives of a program; `silent` keeps programs without collectives, to skip."""
    if id(jaxpr) in silent:
        return
    quiet = True
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KINDS:
            along = axes_of(eqn, axes)
            for operand in eqn.invars if along else ():
                aval: Any = operand.aval
                shape, dtype = aval.shape, aval.dtype
                size = math.prod(shape) * dtype.itemsize
                workers = group_size(eqn, along, axes)
                kind, short = KINDS[name], _short(dtype)
                quiet = False
                yield Collective(kind, short, shape, size, branch, repeated, workers, along)
            continue
        loop = repeated or name in ("while", "scan")
        for number, inner in enumerate(programs_in(eqn)):
            under = (*branch, number) if name == "cond" else branch
            for found in _walk(inner, axes, under, loop, silent):
                quiet = False
                yield found
    if quiet:
        silent[id(jaxpr)] = jaxpr  # while it is referenced, no other object gets its id


def programs_in(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if isinstance(inner, core.Jaxpr):
                yield inner


def axes_of(eqn: core.JaxprEqn, axes: Axes) -> tuple[str, ...]:
    """Return the named axes of a collective. Under vmap, `psum` also has integer axes."""
    named = eqn.params["axes" if "axes" in eqn.params else "axis_name"]
    several = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in several if axis in axes)


def group_size(eqn: core.JaxprEqn, along: tuple[str, ...], axes: Axes) -> int:
    groups = eqn.params.get("axis_index_groups")
    return len(groups[0]) if groups else math.prod(axes[axis] for axis in along)


def _short(dtype: Any) -> str:
    kind = {"f": "f", "i": "s", "u": "u", "c": "c", "V": "f"}.get(dtype.kind, "")
    if dtype == jnp.bfloat16:
        return "bf16"
    return "pred" if dtype.kind == "b" else f"{kind}{8 * dtype.itemsize}"
