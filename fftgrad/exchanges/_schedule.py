"""Exchanges that change during a run: at given steps, or level by level."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Averaged, Comm, Exchange, PyTree, Scope, State, Stats
from fftgrad._values import check, check_count, check_type, plain, value
from fftgrad.exchanges._recipe import check_exchange


class Several(Exchange):
    """Exchange: runs one of several exchanges, by `lax.switch` in one program."""

    exchanges: tuple[Exchange, ...]

    @property
    def scope(self) -> Scope | None:
        scopes: list[Scope] = [e.scope for e in self.exchanges if e.scope is not None]
        same = all(scope == scopes[0] for scope in scopes)
        argument = f"{type(self).__name__}(exchanges)"
        check(same, argument, "have one scope", scopes, "choose one, as Bucketing(scope='leaf').")
        return scopes[0] if scopes else None

    def init(self, like: PyTree) -> State:
        return State(*zip(*(exchange.init(like) for exchange in self.exchanges), strict=True))

    def wire_bytes(self, like: PyTree) -> int:
        return common("wire_bytes", self, [e.wire_bytes(like) for e in self.exchanges])

    def link_bytes(self, like: PyTree, workers: int) -> float:
        return common("link_bytes", self, [e.link_bytes(like, workers) for e in self.exchanges])

    def run(self, index: jax.Array, x: PyTree, state: State, comm: Comm) -> Averaged:
        """Run exchange `index`, a number equal on all workers; return all exchanges' states."""
        states = [State(*fields) for fields in zip(*state, strict=True)]

        def branch(i: int, x: PyTree, states: list[State]) -> Averaged:
            out = self.exchanges[i].mean(x, states[i], comm)
            # `lax.switch` needs equal types, but the results may vary along different axes.
            like = jax.tree.leaves(out.mean)[0]
            stats = Stats.of_all([out.stats])
            every = [*states[:i], out.state, *states[i + 1 :]]
            return out._replace(
                error=jax.tree.map(_axes.vary_like, out.error_or_zeros(x), x),
                state=State(*zip(*every, strict=True)),
                stats=jax.tree.map(lambda leaf: _axes.vary_like(leaf, like), stats),
            )

        branches = [functools.partial(branch, i) for i in range(len(self.exchanges))]
        return lax.switch(index, branches, x, states)


def common(asked: str, owner: Exchange, sizes: Sequence[Any]) -> Any:
    found, remedy = sorted(set(sizes)), "ask for those of exchange.at(step)."
    argument = f"{asked}({type(owner).__name__})"
    check(len(found) == 1, argument, "be equal in all steps", found, remedy)
    return sizes[0]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Scheduled(Several):
    """Exchange: switches to another exchange at given steps.

    All exchanges are compiled into one program, and `lax.switch` runs one of them. So a switch does
    not recompile, and only the running exchange sends bytes. The residual is carried over. The
    states of the other exchanges stay unchanged. For a dense warm-up use
    `Scheduled({0: AllReduce(), 500: AllGather(codec)})`.

    Args:
      schedule: a dict from the first step of an exchange to the exchange; one of the steps is 0.

    Wire: the bytes of the running exchange, `.at(step).wire_bytes(x)`; `fg.audit` lists all.

    Example:
      >>> exchange = fg.Scheduled({0: fg.AllReduce(), 500: fg.AllGather(fg.TopK(fraction=0.01))})
      >>> exchange.at(499), exchange.at(500)
      (AllReduce(), AllGather(codec=TopK(fraction=0.01)))
    """

    starts: tuple[int, ...]
    exchanges: tuple[Exchange, ...]

    def __init__(self, schedule: Mapping[int, Exchange]) -> None:
        argument, remedy = "Scheduled(schedule)", "use {0: AllReduce(), 500: exchange}."
        is_map = isinstance(schedule, Mapping)
        check_type(is_map, argument, "map steps to exchanges", schedule, remedy)
        pairs = {plain(step): exchange for step, exchange in schedule.items()}
        for step, exchange in pairs.items():
            check_count("Scheduled(step)", step, remedy, least=0)
            check_exchange(f"{argument[:-1]}[{step}])", exchange)
        check(0 in pairs, argument, "have 0 as its first step", sorted(pairs), remedy)
        object.__setattr__(self, "starts", tuple(sorted(pairs)))
        object.__setattr__(self, "exchanges", tuple(pairs[start] for start in self.starts))

    def __repr__(self) -> str:
        return f"Scheduled({dict(zip(self.starts, self.exchanges, strict=True))!r})"

    def at(self, step: int) -> Exchange:
        """Return the exchange that runs at a step."""
        return self.exchanges[sum(start <= step for start in self.starts) - 1]

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        later = jnp.asarray(self.starts[1:], jnp.int32)
        index = jnp.sum((comm.step.number >= later).astype(jnp.int32))
        return self.run(index, x, state, comm)


class LadderState(NamedTuple):
    """Shared state of `Ladder`: the number of the exchange in use, and the state of each."""

    level: jax.Array
    exchanges: tuple[PyTree, ...]


@value
class Ladder(Several):
    """Exchange: runs the first of several exchanges, until the caller moves to the next exchange.

    As with `Scheduled`, a move does not recompile. `fg.methods.recover_by_loss` decides by the loss
    when to move. To decide by another criterion, such as the error of `track_error`, call
    `fg.exchanges.next_level`.

    Args:
      exchanges: the exchanges, in a tuple that begins with the strongest compression.

    Wire: the bytes of the exchange in use, `.at(level).wire_bytes(x)`.

    Example:
      >>> exchange = fg.exchanges.Ladder((fg.AllGather(fg.TopK(fraction=0.01)), fg.AllReduce()))
      >>> exchange.at(1)
      AllReduce()

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    exchanges: tuple[Exchange, ...]

    def __post_init__(self) -> None:
        argument, found = "Ladder(exchanges)", repr(self.exchanges)
        some = bool(self.exchanges) and isinstance(self.exchanges, tuple)
        remedy = "use (AllGather(TopK(fraction=0.01)), AllReduce())."
        check(some, argument, "be a tuple of exchanges", found, remedy)
        for number, exchange in enumerate(self.exchanges):
            check_exchange(f"Ladder(exchanges[{number}])", exchange)

    def at(self, level: int) -> Exchange:
        """Return the exchange of a level."""
        return self.exchanges[level]

    def init(self, like: PyTree) -> State:
        every = super().init(like)
        return every._replace(shared=LadderState(jnp.zeros((), jnp.int32), every.shared))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        level, exchanges = state.shared
        out = self.run(level, x, state._replace(shared=exchanges), comm)
        shared = LadderState(level, out.state.shared)
        return out._replace(state=out.state._replace(shared=shared))


def next_level(state: PyTree, when: jax.Array | bool = True) -> Any:
    """Function: move each `Ladder` in the state of an optimizer to its next level.

    A ladder at its last level stays there. Call it inside the step or between steps.

    Args:
      state: the state of `compressed_pmean`, or a state that contains it.
      when: True to move, equal on all workers.

    Returns:
      A state of the same structure.

    Example:
      >>> ladder = fg.exchanges.Ladder((fg.AllGather(fg.TopK(k=1)), fg.AllReduce()))
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
