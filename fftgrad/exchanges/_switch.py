"""One of several exchanges, chosen at run time, in one program."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Channel, Exchange, PyTree, Reduced, Scope, State, Tally

_Size = TypeVar("_Size", int, float)


def switch(
    index: jax.Array,
    exchanges: Sequence[Exchange],
    x: PyTree,
    state: State,
    channel: Channel,
) -> Reduced:
    """What exchange `index`, equal on all workers, makes of `x`; the states of all of them."""
    states = [State(*fields) for fields in zip(*state, strict=True)]

    def branch(position: int) -> Callable[[PyTree, list[State]], Reduced]:
        def run(x: PyTree, states: list[State]) -> Reduced:
            out = exchanges[position].mean(x, states[position], channel)
            # Typed alike in all branches, whatever each knows to be equal along other axes.
            like = jax.tree.leaves(out.mean)[0]
            tally = Tally.of_all([out.tally])
            return out._replace(
                error=jax.tree.map(_axes.vary_like, out.error, x),
                state=join([*states[:position], out.state, *states[position + 1 :]]),
                tally=jax.tree.map(lambda leaf: _axes.vary_like(leaf, like), tally),
            )

        return run

    return lax.switch(index, list(map(branch, range(len(exchanges)))), x, states)


def join(states: Sequence[State]) -> State:
    """The states of several exchanges as that of one, field by field."""
    return State(*zip(*states, strict=True))


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
            f"{asked}({owner}): the bytes change by step, got {sorted(set(sizes))}; ask for "
            "those of exchange.at(step), with the layout of the method, if it is of one."
        )
    return sizes[0]
