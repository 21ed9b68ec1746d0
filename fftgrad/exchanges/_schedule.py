"""An exchange that changes at given steps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Averaged, Comm, Exchange, PyTree, Scope, State, Stats, Step
from fftgrad._values import brief, plain, value
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
        return common_scope("Scheduled", self.exchanges)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All of them, in their order."""
        return tuple(exchange for _, exchange in self.schedule)

    def init(self, like: PyTree) -> State:
        return join([exchange.init(like) for exchange in self.exchanges])

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        return switch(self._running(comm.step), self.exchanges, x, state, comm)

    def wire_bytes(self, like: PyTree) -> int:
        return common_bytes("Scheduled", self.exchanges, like)

    def link_bytes(self, like: PyTree, workers: int) -> float:
        return common_link_bytes("Scheduled", self.exchanges, like, workers)

    def _running(self, step: Step) -> jax.Array:
        starts = jnp.asarray([start for start, _ in self.schedule[1:]], jnp.int32)
        return jnp.sum((step.number >= starts).astype(jnp.int32))


_Size = TypeVar("_Size", int, float)


def switch(
    index: jax.Array,
    exchanges: Sequence[Exchange],
    x: PyTree,
    state: State,
    comm: Comm,
) -> Averaged:
    """What exchange `index`, equal on all workers, makes of `x`; the states of all of them."""
    states = [State(*fields) for fields in zip(*state, strict=True)]

    def branch(position: int) -> Callable[[PyTree, list[State]], Averaged]:
        def run(x: PyTree, states: list[State]) -> Averaged:
            out = exchanges[position].mean(x, states[position], comm)
            # Typed alike in all branches, whatever each knows to be equal along other axes.
            like = jax.tree.leaves(out.mean)[0]
            stats = Stats.of_all([out.stats])
            return out._replace(
                error=jax.tree.map(_axes.vary_like, out.error_or_zeros(x), x),
                state=join([*states[:position], out.state, *states[position + 1 :]]),
                stats=jax.tree.map(lambda leaf: _axes.vary_like(leaf, like), stats),
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
            "which in the bucketing, as Bucketing(scope='leaf')."
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
            "those of exchange.at(step), with the bucketing of the method, if it is of one."
        )
    return sizes[0]


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
        return common_scope("Ladder", self.exchanges)

    def init(self, like: PyTree) -> State:
        every = join([exchange.init(like) for exchange in self.exchanges])
        return every._replace(shared=LadderState(jnp.zeros((), jnp.int32), every.shared))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        level, exchanges = state.shared
        every = state._replace(shared=exchanges)
        out = switch(level, self.exchanges, x, every, comm)
        shared = LadderState(level, out.state.shared)
        return out._replace(state=out.state._replace(shared=shared))

    def wire_bytes(self, like: PyTree) -> int:
        return common_bytes("Ladder", self.exchanges, like)

    def link_bytes(self, like: PyTree, workers: int) -> float:
        return common_link_bytes("Ladder", self.exchanges, like, workers)


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
