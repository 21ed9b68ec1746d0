"""One of several exchanges, chosen at run time, in one program."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, PyTree, Reduced, Scope, Step
from fftgrad.exchanges import _counts

_Size = TypeVar("_Size", int, float)


def switch(
    index: jax.Array,
    exchanges: Sequence[Exchange],
    x: PyTree,
    states: tuple[PyTree, ...],
    step: Step,
    axis_name: AxisName,
) -> Reduced:
    """What exchange `index`, equal on all workers, makes of `x`; the states of all of them."""

    def branch(position: int) -> Callable[..., Reduced]:
        def run(x: PyTree, states: tuple[PyTree, ...], step: Step) -> Reduced:
            out = exchanges[position].mean(x, states[position], step, axis_name)
            out = _counts.told(out, step, axis_name)
            # Typed alike in all branches, whatever each knows to be equal along other axes.
            like = jax.tree.leaves(out.mean)[0]
            return out._replace(
                sent=jax.tree.map(_axes.vary_like, out.sent, x),
                finite=_axes.vary_like(out.finite, like),
                overflow=_axes.vary_like(jnp.asarray(out.overflow, jnp.int32), like),
                invalid=_axes.vary_like(jnp.asarray(out.invalid, jnp.int32), like),
                state=(*states[:position], out.state, *states[position + 1 :]),
                workers=jax.tree.map(lambda n: _axes.vary_like(n, like), out.workers),
            )

        return run

    return lax.switch(index, list(map(branch, range(len(exchanges)))), x, states, step)


def observe(
    index: jax.Array,
    exchanges: Sequence[Exchange],
    states: tuple[PyTree, ...],
    loss: jax.Array,
    step: Step,
) -> tuple[PyTree, ...]:
    """The states, once exchange `index`, and no other, has seen the loss of its step."""
    return tuple(
        jax.tree.map(
            lambda new, old, ran=(index == position): jnp.where(ran, new, old),
            exchange.observe(state, loss, step),
            state,
        )
        for position, (exchange, state) in enumerate(zip(exchanges, states, strict=True))
    )


def common_scope(owner: str, exchanges: Sequence[Exchange]) -> Scope | None:
    """The parts that all exchanges are made for."""
    scopes: list[Scope] = [exchange.scope for exchange in exchanges if exchange.scope is not None]
    if any(scope != scopes[0] for scope in scopes):
        raise ValueError(
            f"{owner}: its exchanges must be made for the same parts, got scopes {scopes}; say "
            "which in the layout, as Layout(scope='leaf')."
        )
    return scopes[0] if scopes else None


def common_bytes(owner: str, exchanges: Sequence[Exchange], like: PyTree) -> int:
    """The bytes of all exchanges, where they are equal."""
    return _common("wire_bytes", owner, [exchange.wire_bytes(like) for exchange in exchanges])


def common_link_bytes(
    owner: str, exchanges: Sequence[Exchange], like: PyTree, workers: int
) -> float:
    """The bytes over a link of all exchanges, where they are equal."""
    sizes = [exchange.link_bytes(like, workers) for exchange in exchanges]
    return _common("link_bytes", owner, sizes)


def _common(asked: str, owner: str, sizes: Sequence[_Size]) -> _Size:
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{asked}({owner}): the bytes change by step, got {sorted(set(sizes))}; ask "
            f"{asked}({owner.lower()}.at(...), ...)."
        )
    return sizes[0]
