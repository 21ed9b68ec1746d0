"""Less compression where it hurts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import Channel, Exchange, PyTree, Reduced, Scope, State, Step
from fftgrad._values import value
from fftgrad.exchanges import _switch
from fftgrad.exchanges._recipe import check_exchange
from fftgrad.ops import _collectives

NONE = float(jnp.finfo(jnp.float32).max)
"""No loss so far; an infinity would stop a healthy step under `jax_debug_infs`."""


class FallbackState(NamedTuple):
    """What `Fallback` shares.

    Attributes:
      level: which exchange is in use from now on.
      ran: which one ran in the last step, of which the loss tells.
      exchanges: what each shares.
      loss: the smoothed loss; the largest float32 before the first.
      best: the least smoothed loss since the level was reached.
    """

    level: jax.Array
    ran: jax.Array
    exchanges: tuple[PyTree, ...]
    loss: jax.Array
    best: jax.Array


@value
class Fallback(Exchange):
    """Exchange: go to the next, milder one when the error or the loss says so, never back.

    The exchanges are compiled into one program and `lax.switch` runs one, so nothing is recompiled
    at the change. After a step the level rises by one if

        √(Σ_i ||x_i - sent_i||² / Σ_i ||x_i||²) > max_error, over the workers i, or
        the smoothed loss exceeds (1 + tolerance) times the least since the level was reached, or
        is not finite; the loss comes by `tx.update(grads, state, params, value=loss)`. A step whose
        gradients are not finite is skipped, and tells nothing.

    Args:
      ladder: the exchanges, the one that compresses most first.
      max_error: the relative error of what is sent, 0 < max_error; None does not watch it.
      tolerance: by how much the loss may rise, 0.1 for a tenth; None does not watch it.
      smoothing: weight of the past in the smoothed loss.

    Shapes: as the exchanges.

    Wire: of the exchange in use, `.at(level).wire_bytes(x)`, and 12 bytes if the error is watched.

    Claims: those of the exchange in use.

    Differs from the paper: it says that lowering theta recovers a failed run; when to, is ours.

    Raises:
      ValueError: if there are no exchanges, nothing is watched, a bound is not positive, or
        `max_error` is to watch an exchange whose `sent` is x (`Hierarchical`).

    Example:
      >>> exchange = fg.Fallback((fg.AllGather(fg.TopK(fraction=0.01)), fg.AllReduce()), 0.9)
      >>> exchange.at(1)
      AllReduce()

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    ladder: tuple[Exchange, ...]
    max_error: float | None = None
    tolerance: float | None = None
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        if not self.ladder or not isinstance(self.ladder, tuple):
            raise ValueError(
                f"Fallback(ladder): must be a tuple of exchanges, got {self.ladder!r}; for example "
                "(AllGather(TopK(fraction=0.01)), AllReduce())."
            )
        for number, rung in enumerate(self.ladder):
            check_exchange(f"Fallback(ladder[{number}])", rung)
        bounds = [bound for bound in (self.max_error, self.tolerance) if bound is not None]
        if not bounds or min(bounds) <= 0 or not 0 <= self.smoothing < 1:
            raise ValueError(
                f"Fallback(max_error, tolerance, smoothing): one bound must be given, bounds "
                f"positive and smoothing in [0, 1), got {self.max_error}, {self.tolerance} and "
                f"{self.smoothing}; use max_error=0.9 or tolerance=0.1."
            )
        blind = [rung for rung in self.ladder if rung.keeps_error]
        if self.max_error is not None and blind:
            raise ValueError(
                "Fallback(max_error): must be None for an exchange that keeps what it loses in a "
                f"memory of its own, because there is no error to see, got {self.max_error} for "
                f"{blind[0]!r}; use tolerance=0.1, which goes by the loss."
            )

    def at(self, level: int) -> Exchange:
        """The exchange of a level."""
        return self.ladder[level]

    def init(self, like: PyTree) -> State:
        rungs = _switch.join([rung.init(like) for rung in self.ladder])
        shared = FallbackState(
            level=jnp.zeros((), jnp.int32),
            ran=jnp.zeros((), jnp.int32),
            exchanges=rungs.shared,
            loss=jnp.full((), NONE, jnp.float32),
            best=jnp.full((), NONE, jnp.float32),
        )
        return rungs._replace(shared=shared)

    @property
    def scope(self) -> Scope | None:
        return _switch.common_scope("Fallback", self.ladder)

    @property
    def inner(self) -> tuple[Exchange, ...]:
        return self.ladder

    @property
    def needs_loss(self) -> bool:
        return self.tolerance is not None or super().needs_loss

    @property
    def watches_error(self) -> bool:
        return self.max_error is not None or super().watches_error

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        shared: FallbackState = state.shared
        rungs = state._replace(shared=shared.exchanges)
        out = _switch.switch(shared.level, self.ladder, x, rungs, channel)
        shared = shared._replace(ran=shared.level, exchanges=out.state.shared)
        if self.max_error is not None:
            lost = jax.tree.map(jnp.subtract, x, out.sent)
            too_much = channel.relative_error(lost, x) > self.max_error
            shared = self._rise(shared, too_much)  # undone where a step is bad
        return out._replace(state=out.state._replace(shared=shared))

    def observe(self, shared: FallbackState, loss: jax.Array, step: Step) -> FallbackState:
        exchanges = _switch.observe(shared.ran, self.ladder, shared.exchanges, loss, step)
        state = shared._replace(exchanges=exchanges)
        if self.tolerance is None:
            return state
        smoothed = self.smoothing * state.loss + (1 - self.smoothing) * loss
        smoothed = jnp.where(state.loss < NONE, smoothed, loss)
        seen = state._replace(loss=smoothed, best=jnp.fmin(state.best, smoothed))
        worse = ~(smoothed <= state.best + self.tolerance * jnp.abs(state.best))
        risen = self._rise(seen, (state.best < NONE) & worse | ~jnp.isfinite(loss))
        # If the error has ended the level in this step, the loss says nothing of the next one.
        return optax.tree.where(state.ran == state.level, risen, state)

    def wire_bytes(self, like: PyTree) -> int:
        watched = 12 * (self.max_error is not None)
        return _switch.common_bytes("Fallback", self.ladder, like) + watched

    def link_bytes(self, like: PyTree, workers: int) -> float:
        watched = 12 * (self.max_error is not None) * _collectives.RING["all-reduce"](workers)
        return _switch.common_link_bytes("Fallback", self.ladder, like, workers) + watched

    def _rise(self, state: FallbackState, condition: jax.Array) -> FallbackState:
        start = jnp.full((), NONE, jnp.float32)
        return state._replace(
            level=jnp.minimum(state.level + condition.astype(jnp.int32), len(self.ladder) - 1),
            loss=jnp.where(condition, start, state.loss),
            best=jnp.where(condition, start, state.best),
        )
