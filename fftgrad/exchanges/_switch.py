"""One of several exchanges, chosen at run time, in one program."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from fftgrad._base import AxisName, Exchange, PyTree, Reduced, Rng


def switch(
    index: jax.Array,
    exchanges: Sequence[Exchange],
    x: PyTree,
    states: tuple[PyTree, ...],
    rng: Rng,
    axis_name: AxisName,
) -> Reduced:
    """What exchange `index`, equal on all workers, makes of `x`; the states of all of them."""

    def branch(position: int) -> Callable[..., Reduced]:
        def run(x: PyTree, states: tuple[PyTree, ...], rng: Rng) -> Reduced:
            out = exchanges[position].mean(x, states[position], rng, axis_name)
            return out._replace(state=(*states[:position], out.state, *states[position + 1 :]))

        return run

    return lax.switch(index, list(map(branch, range(len(exchanges)))), x, states, rng)


def common_bytes(owner: str, exchanges: Sequence[Exchange], like: PyTree) -> int:
    """The bytes of all exchanges, where they are equal."""
    sizes = {exchange.wire_bytes(like) for exchange in exchanges}
    if len(sizes) > 1:
        raise ValueError(
            f"wire_bytes({owner}): the bytes change by step, got {sorted(sizes)}; ask "
            f"wire_bytes({owner.lower()}.at(...), like)."
        )
    return sizes.pop()
