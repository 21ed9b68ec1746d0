"""An exchange that changes at given steps."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fftgrad._contracts import Channel, Exchange, PyTree, Reduced, Scope, State, Step
from fftgrad._values import brief, plain
from fftgrad.exchanges import _switch
from fftgrad.exchanges._recipe import check_exchange


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Scheduled(Exchange):
    """Exchange: another exchange from each given step on.

    All are compiled into one program and `lax.switch` runs one, so nothing is recompiled when the
    step passes a boundary, and only the bytes of the running exchange move. Dense warm-up is
    `Scheduled({0: AllReduce(), 500: AllGather(codec)})`.

    Args:
      schedule: {first step: exchange}; steps count from 0 and one of them is 0.

    Shapes: as the exchanges.

    Wire: of the exchange that runs, `.at(step).wire_bytes(x)`; `fg.audit` lists each branch.

    Claims: those of the exchange that runs.

    Raises:
      ValueError: if no exchange starts at step 0, or a step is negative.
      TypeError: if a step is not an int or a value not an exchange.

    Example:
      >>> exchange = fg.Scheduled({0: fg.AllReduce(), 500: fg.AllGather(fg.TopK(fraction=0.01))})
      >>> exchange.at(499), exchange.at(500)
      (AllReduce(), AllGather(codec=TopK(fraction=0.01)))
    """

    schedule: tuple[tuple[int, Exchange], ...]

    def __init__(self, schedule: Mapping[int, Exchange]) -> None:
        if not isinstance(schedule, Mapping):
            raise TypeError(
                f"Scheduled(schedule): must map steps to exchanges, got {brief(schedule)}; use "
                "{0: AllReduce(), 500: exchange}."
            )
        pairs = {plain(step): exchange for step, exchange in schedule.items()}
        for step, exchange in pairs.items():
            if not isinstance(step, int):
                raise TypeError(
                    f"Scheduled(schedule): must map int steps to exchanges, got {step!r}; use "
                    "{0: AllReduce(), 500: exchange}."
                )
            check_exchange(f"Scheduled(schedule[{step}])", exchange)
        if 0 not in pairs or min(pairs) < 0:
            raise ValueError(
                f"Scheduled(schedule): the first step must be 0, got {sorted(pairs)}; add "
                "0: AllReduce() for a dense start."
            )
        object.__setattr__(self, "schedule", tuple(sorted(pairs.items(), key=lambda p: p[0])))

    def __repr__(self) -> str:
        return f"Scheduled({dict(self.schedule)!r})"

    def at(self, step: int) -> Exchange:
        """The exchange that runs at a step."""
        return [exchange for start, exchange in self.schedule if start <= step][-1]

    @property
    def scope(self) -> Scope | None:
        return _switch.common_scope("Scheduled", self.inner)

    @property
    def inner(self) -> tuple[Exchange, ...]:
        return tuple(exchange for _, exchange in self.schedule)

    def init(self, like: PyTree) -> State:
        return _switch.join([exchange.init(like) for exchange in self.inner])

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        return _switch.switch(self._running(channel.step), self.inner, x, state, channel)

    def wire_bytes(self, like: PyTree) -> int:
        return _switch.common_bytes("Scheduled", self.inner, like)

    def link_bytes(self, like: PyTree, workers: int) -> float:
        return _switch.common_link_bytes("Scheduled", self.inner, like, workers)

    def _running(self, step: Step) -> jax.Array:
        starts = jnp.asarray([start for start, _ in self.schedule[1:]], jnp.int32)
        return jnp.sum((step.number >= starts).astype(jnp.int32))
