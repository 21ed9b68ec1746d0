"""Less compression from the step on in which the caller says so."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Channel, Exchange, PyTree, Reduced, Scope, State
from fftgrad._values import value
from fftgrad.exchanges import _switch
from fftgrad.exchanges._recipe import check_exchange


class LadderState(NamedTuple):
    """What `Ladder` shares.

    Attributes:
      level: which exchange is in use.
      exchanges: what each shares.
    """

    level: jax.Array
    exchanges: tuple[PyTree, ...]


@value
class Ladder(Exchange):
    """Exchange: the first of several, until the caller goes to the next, milder one.

    The exchanges are compiled into one program and `lax.switch` runs one, so nothing is recompiled
    at the change, and the memory of `compressed_pmean` serves all of them.
    `fg.methods.recover_by_loss` goes by the loss. To go by anything else, such as the error that
    `track_error` shows, call `fg.exchanges.next_level`.

    Args:
      exchanges: the one that compresses most first.

    Shapes: as the exchanges.

    Wire: of the exchange in use, `.at(level).wire_bytes(x)`.

    Claims: those of the exchange in use.

    Raises:
      ValueError: if there are no exchanges.

    Example:
      >>> exchange = fg.Ladder((fg.AllGather(fg.TopK(fraction=0.01)), fg.AllReduce()))
      >>> exchange.at(1)
      AllReduce()

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    exchanges: tuple[Exchange, ...]

    def __post_init__(self) -> None:
        if not self.exchanges or not isinstance(self.exchanges, tuple):
            raise ValueError(
                f"Ladder(exchanges): must be a tuple of exchanges, got {self.exchanges!r}; for "
                "example (AllGather(TopK(fraction=0.01)), AllReduce())."
            )
        for number, exchange in enumerate(self.exchanges):
            check_exchange(f"Ladder(exchanges[{number}])", exchange)

    def at(self, level: int) -> Exchange:
        """The exchange of a level."""
        return self.exchanges[level]

    @property
    def scope(self) -> Scope | None:
        return _switch.common_scope("Ladder", self.exchanges)

    @property
    def inner(self) -> tuple[Exchange, ...]:
        return self.exchanges

    def init(self, like: PyTree) -> State:
        every = _switch.join([exchange.init(like) for exchange in self.exchanges])
        return every._replace(shared=LadderState(jnp.zeros((), jnp.int32), every.shared))

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        level, exchanges = state.shared
        every = state._replace(shared=exchanges)
        out = _switch.switch(level, self.exchanges, x, every, channel)
        shared = LadderState(level, out.state.shared)
        return out._replace(state=out.state._replace(shared=shared))

    def wire_bytes(self, like: PyTree) -> int:
        return _switch.common_bytes("Ladder", self.exchanges, like)

    def link_bytes(self, like: PyTree, workers: int) -> float:
        return _switch.common_link_bytes("Ladder", self.exchanges, like, workers)


def next_level(state: PyTree, when: jax.Array | bool = True) -> Any:
    """Function: the state of an optimizer, in which each `Ladder` is at its next level.

    A ladder at its last level stays there. It may be called inside of the step or between steps.

    Args:
      state: of `compressed_pmean`, or of an optimizer with one in it.
      when: whether to go to the next level, equal on all workers.

    Returns:
      The state, of the same structure.

    Example:
      >>> ladder = fg.Ladder((fg.AllGather(fg.TopK(k=1)), fg.AllReduce()))
      >>> tx = fg.compressed_pmean(ladder, axis_name="data", track_error=True)
      >>> state = tx.init(jnp.zeros(9))
      >>> state = fg.exchanges.next_level(state, when=state.error > 0.9)
      >>> int(fg.exchanges.next_level(state).exchange[0].shared.level)
      1
    """

    def climbed(node: Any) -> Any:
        if not isinstance(node, LadderState):
            return node
        level = node.level + jnp.asarray(when).astype(jnp.int32)
        return node._replace(level=jnp.minimum(level, len(node.exchanges) - 1))

    return jax.tree.map(climbed, state, is_leaf=lambda node: isinstance(node, LadderState))
