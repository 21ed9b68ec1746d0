"""What a function sends along named axes, and what it computes between, read off its trace.

No device is needed, so the axes may be of any size: a trace knows the collectives of 64 workers as
well as those of one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

Axes = Mapping[str, int]
"""The size of each axis by its name."""

RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda w: 2 * (w - 1) / w,
    "all-gather": lambda w: w - 1,
    "reduce-scatter": lambda w: (w - 1) / w,
    "all-to-all": lambda w: (w - 1) / w,
    "ragged-all-to-all": lambda w: (w - 1) / w,
    "collective-permute": lambda w: float(w > 1),
    "collective-broadcast": lambda w: (w - 1) / w,
}
"""How often each byte of one worker leaves it, where w workers form a ring."""

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
      dtype: as the compiler names it, which is the width on the wire: "u32", "f32".
      shape: of what one worker hands over.
      bytes: of what one worker hands over.
      branch: the branches of the conditionals around it, outermost first; () if it always runs.
      repeated: whether it is in a loop; the bytes are those of one turn.
      workers: how many take part in it, with each other; None if the program does not say: all.
      axes: the axes along which they are; None where a compiled program no longer knows them.
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
        """Bytes that one worker sends over its link, where the workers form a ring."""
        return self.bytes * RING[self.kind](workers)


def collectives(function: Callable[..., Any], axes: Axes, *likes: Any) -> tuple[Collective, ...]:
    """Every collective that `function` calls for arguments like `likes`, in its order."""
    closed = jax.make_jaxpr(function, axis_env=list(axes.items()))(*likes)
    return tuple(_walk(closed.jaxpr, axes, (), repeated=False))


def link_bytes(function: Callable[..., Any], axes: Axes, *likes: Any) -> float:
    """Bytes that one worker sends over its link, where those of each axis form a ring."""
    found = collectives(function, axes, *likes)
    if any(c.branch or c.repeated for c in found):
        raise ValueError(
            "link_bytes(...): must be the same in every step, got collectives under a condition or "
            "in a loop; let the exchange have a link_bytes of its own."
        )
    return float(sum(c.link_bytes(c.workers or 1) for c in found))


def alone(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """What `function` computes on one of so many equal workers, without the others.

    A collective returns at once what it would if all workers had sent the same, and this one were
    the first of them.
    """

    def run(*args: Any) -> Any:
        trace = jax.make_jaxpr(function, axis_env=list(axes.items()), return_shape=True)
        closed, shape = trace(*args)
        out = _evaluate(closed.jaxpr, closed.consts, axes, jax.tree.leaves(args), [])
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def until_sent(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """What `function` hands to its first collective, and so, compiled, no more of it.

    Of a conditional with collectives inside, what goes into it; nothing, if there is none.
    """

    def run(*args: Any) -> Any:
        closed = jax.make_jaxpr(function, axis_env=list(axes.items()))(*args)
        sent = list[Sequence[Any]]()
        _evaluate(closed.jaxpr, closed.consts, axes, jax.tree.leaves(args), sent)
        return sent[0] if sent else ()

    return run


def _walk(
    jaxpr: core.Jaxpr, axes: Axes, branch: tuple[int, ...], *, repeated: bool
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KINDS:
            along = _along(eqn, axes)
            for operand in eqn.invars if along else ():
                aval: Any = operand.aval
                shape, dtype = aval.shape, aval.dtype
                size = math.prod(shape) * dtype.itemsize
                workers = _workers(eqn, along, axes)
                kind, short = KINDS[name], _short(dtype)
                yield Collective(kind, short, shape, size, branch, repeated, workers, along)
        elif name == "cond":
            for number, inner in enumerate(_inner(eqn)):
                yield from _walk(inner, axes, (*branch, number), repeated=repeated)
        else:
            loop = name in ("while", "scan")
            for inner in _inner(eqn):
                yield from _walk(inner, axes, branch, repeated=repeated or loop)


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs inside of an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if isinstance(inner, core.Jaxpr):
                yield inner


def _along(eqn: core.JaxprEqn, axes: Axes) -> tuple[str, ...]:
    """The named axes of a collective; those of an array, of `psum` under vmap, are numbers."""
    named = eqn.params["axes" if "axes" in eqn.params else "axis_name"]
    several = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in several if axis in axes)


def _workers(eqn: core.JaxprEqn, along: tuple[str, ...], axes: Axes) -> int:
    """How many take part in a collective with each other."""
    groups = eqn.params.get("axis_index_groups")
    return len(groups[0]) if groups else math.prod(axes[axis] for axis in along)


def _short(dtype: Any) -> str:
    kind = {"f": "f", "i": "s", "u": "u", "c": "c", "V": "f"}.get(dtype.kind, "")
    if dtype == jnp.bfloat16:
        return "bf16"
    return "pred" if dtype.kind == "b" else f"{kind}{8 * dtype.itemsize}"


def _evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    axes: Axes,
    args: Sequence[Any],
    sent: list[Sequence[Any]],
) -> Any:
    """The results of a program without the other workers; `sent` gets what it hands to each."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        out = _apply(eqn, axes, list(map(read, eqn.invars)), sent)
        values.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def _apply(
    eqn: core.JaxprEqn, axes: Axes, args: list[Any], sent: list[Sequence[Any]]
) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "axis_index":
        return [jnp.int32(0)]
    if name in KINDS and (along := _along(eqn, axes)):
        workers = _workers(eqn, along, axes)
        sent.append(args)
        # Kept whole: a compiler that knew that all workers sent the same would decode it once.
        return lax.optimization_barrier([_received(eqn, workers, x) for x in args])
    inner = list(_inner(eqn))
    if any(_has(program, {*KINDS, "axis_index"}) for program in inner):
        return _apply_inside(eqn, inner, axes, args, sent)
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _apply_inside(
    eqn: core.JaxprEqn,
    inner: list[core.Jaxpr],
    axes: Axes,
    args: list[Any],
    sent: list[Sequence[Any]],
) -> Sequence[Any]:
    if eqn.primitive.name == "cond":
        if any(_has(program, {*KINDS}) for program in inner):
            sent.append(args)

        def branch(closed: Any) -> Callable[..., Any]:
            return lambda *own: _evaluate(closed.jaxpr, closed.consts, axes, own, [])

        return lax.switch(args[0], list(map(branch, eqn.params["branches"])), *args[1:])
    if eqn.primitive.name in ("while", "scan") or len(inner) != 1:
        raise NotImplementedError(
            f"alone(function): must have its collectives outside of loops, got one inside of "
            f"{eqn.primitive.name}; time it on real devices."
        )
    (closed,) = (p for p in eqn.params.values() if getattr(p, "jaxpr", p) is inner[0])
    return _evaluate(inner[0], getattr(closed, "consts", ()), axes, args, sent)


def _has(jaxpr: core.Jaxpr, names: set[str]) -> bool:
    """Whether any of the primitives is in it, however deep."""
    if any(eqn.primitive.name in names for eqn in jaxpr.eqns):
        return True
    return any(_has(inner, names) for eqn in jaxpr.eqns for inner in _inner(eqn))


def _received(eqn: core.JaxprEqn, workers: int, x: Any) -> Any:
    """What the first worker receives, where all send `x`."""
    params = eqn.params
    match eqn.primitive.name:
        case "psum":
            return x * jnp.asarray(workers, x.dtype)
        case "all_gather":
            return _stack(x, params["all_gather_dimension"], workers, params["tiled"])
        case "all_to_all":
            first = _first(x, params["split_axis"], workers, params["tiled"])
            return _stack(first, params["concat_axis"], workers, params["tiled"])
        case "reduce_scatter":
            first = _first(x, params["scatter_dimension"], workers, params["tiled"])
            return first * jnp.asarray(workers, x.dtype)
        case _:
            return x


def _first(x: Any, axis: int, workers: int, tiled: bool) -> Any:
    if not tiled:
        return lax.index_in_dim(x, 0, axis, keepdims=False)
    return lax.slice_in_dim(x, 0, x.shape[axis] // workers, axis=axis)


def _stack(x: Any, axis: int, workers: int, tiled: bool) -> Any:
    if tiled:
        return jnp.concatenate([x] * workers, axis)
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], workers, *x.shape[axis:]))
