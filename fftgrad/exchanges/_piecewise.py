"""An exchange that changes at given steps."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._base import AxisName, Exchange, PyTree, Reduced, Rng
from fftgrad.exchanges import _switch


class PiecewiseState(NamedTuple):
    """State: the step, equal on all workers, and the state of each exchange."""

    step: jax.Array
    exchanges: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Piecewise:
    """Exchange: another exchange from each given step on.

    All are compiled into one program and `lax.switch` runs one, so nothing is recompiled when the
    step passes a boundary, and only the bytes of the running exchange move. Dense warm-up is
    `Piecewise({0: AllReduce(), 500: AllGather(codec)})`.

    Args:
      schedule: {first step: exchange}; steps count from 0 and one of them is 0.

    Shapes: as the exchanges.

    Wire: of the exchange that runs, `.at(step).wire_bytes(x)`; `fg.audit` lists each branch.

    Claims: those of the exchange that runs.

    Raises:
      ValueError: if no exchange starts at step 0, or a step is negative.
      TypeError: if a step is not an int or a value not an exchange.

    Example:
      >>> import fftgrad as fg
      >>> exchange = fg.Piecewise({0: fg.AllReduce(), 500: fg.AllGather(fg.TopK(fraction=0.01))})
      >>> exchange.at(499), exchange.at(500)
      (AllReduce(), AllGather(codec=TopK(fraction=0.01)))
    """

    schedule: tuple[tuple[int, Exchange], ...]

    def __init__(self, schedule: Mapping[int, Exchange]) -> None:
        pairs = dict(schedule)
        for step, exchange in pairs.items():
            if not isinstance(step, int) or not isinstance(exchange, Exchange):
                raise TypeError(
                    f"Piecewise(schedule): must map int steps to exchanges, got {step!r}: "
                    f"{exchange!r}; wrap a codec as AllGather(codec)."
                )
        if 0 not in pairs or min(pairs) < 0:
            raise ValueError(
                f"Piecewise(schedule): the first step must be 0, got {sorted(pairs)}; add "
                "0: AllReduce() for a dense start."
            )
        object.__setattr__(self, "schedule", tuple(sorted(pairs.items(), key=lambda p: p[0])))

    def __repr__(self) -> str:
        return f"Piecewise({dict(self.schedule)!r})"

    def at(self, step: int) -> Exchange:
        """The exchange that runs at a step."""
        return [exchange for start, exchange in self.schedule if start <= step][-1]

    def init(self, like: PyTree) -> PiecewiseState:
        return PiecewiseState(
            jnp.zeros((), jnp.int32), tuple(exchange.init(like) for _, exchange in self.schedule)
        )

    def mean(self, x: PyTree, state: PiecewiseState, rng: Rng, axis_name: AxisName) -> Reduced:
        exchanges = [exchange for _, exchange in self.schedule]
        starts = jnp.asarray([start for start, _ in self.schedule[1:]], jnp.int32)
        running = jnp.sum((state.step >= starts).astype(jnp.int32))
        out = _switch.switch(running, exchanges, x, state.exchanges, rng, axis_name)
        return out._replace(state=PiecewiseState(state.step + 1, out.state))

    def wire_bytes(self, like: PyTree) -> int:
        return _switch.common_bytes("Piecewise", [e for _, e in self.schedule], like)
