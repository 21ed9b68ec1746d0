"""The program of one of many equal workers, without the others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from fftgrad.ops import _collectives
from fftgrad.ops._collectives import Axes


def alone(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """Run `function` as one of so many equal workers, without the others.

    A collective returns at once the result for workers that all sent the same, of which this one is
    the first.
    """

    def run(*args: Any) -> Any:
        trace = jax.make_jaxpr(function, axis_env=list(axes.items()), return_shape=True)
        closed, shape = trace(*args)
        out = _evaluate(closed.jaxpr, closed.consts, axes, jax.tree.leaves(args), [])
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def until_sent(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """Run `function` up to the operands of its first collective, which compiles no more of it.

    If a conditional has the first collective inside, its operands; without any collective, ().
    """

    def run(*args: Any) -> Any:
        closed = jax.make_jaxpr(function, axis_env=list(axes.items()))(*args)
        sent = list[Sequence[Any]]()
        _evaluate(closed.jaxpr, closed.consts, axes, jax.tree.leaves(args), sent)
        return sent[0] if sent else ()

    return run


def _evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    axes: Axes,
    args: Sequence[Any],
    sent: list[Sequence[Any]],
) -> Any:
    """The results of a program without the other workers; `sent` gets the operands of each."""
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
    if name in _collectives.KINDS and (along := _collectives.axes_of(eqn, axes)):
        workers = _collectives.group_size(eqn, along, axes)
        sent.append(args)
        # With a barrier: a compiler that knew that all workers sent the same would decode it once.
        return lax.optimization_barrier([_received(eqn, workers, x) for x in args])
    inner = list(_collectives.programs_in(eqn))
    if any(has(program, {*_collectives.KINDS, "axis_index"}) for program in inner):
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
        if any(has(program, {*_collectives.KINDS}) for program in inner):
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


def has(jaxpr: core.Jaxpr, names: set[str]) -> bool:
    """True if a program has any of the primitives, at any depth."""
    if any(eqn.primitive.name in names for eqn in jaxpr.eqns):
        return True
    return any(has(inner, names) for eqn in jaxpr.eqns for inner in _collectives.programs_in(eqn))


def _received(eqn: core.JaxprEqn, workers: int, x: Any) -> Any:
    """The array that the first worker receives if all send `x`."""
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
