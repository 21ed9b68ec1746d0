"""Who chooses the coefficients that all workers send."""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Channel, Like, Payload, PyTree, Selector, Step
from fftgrad._values import value
from fftgrad.ops._shapes import spec


class Support(abc.ABC):
    """Value: how the workers of `SharedSupport` come to the same positions.

    Each worker selects by `score`, and `agree` makes the sides of all workers one. Both are called
    for the parts that have a selector.
    """

    @property
    @abc.abstractmethod
    def sends_positions(self) -> bool:
        """Whether the positions travel."""

    def init(self, likes: list[Like]) -> list[PyTree]:
        """What it keeps of the coefficients of each part, equal on all workers."""
        return [() for _ in likes]

    @abc.abstractmethod
    def score(self, z: jax.Array, kept: PyTree) -> jax.Array:
        """By what a worker selects among the coefficients `z` of a part."""

    def leads(self, channel: Channel) -> jax.Array:
        """Whether this worker's choice is the one in use, bool[]; of one worker, if all agree."""
        return channel.index == 0

    @abc.abstractmethod
    def agree(self, sides: list[PyTree], channel: Channel) -> list[PyTree]:
        """The sides that all workers use."""

    def update(
        self, kept: PyTree, selector: Selector, side: PyTree, mean: jax.Array, step: Step
    ) -> PyTree:
        """What it keeps, once the mean of a part's coefficients has come."""
        return kept


@value
class LeaderSupport(Support):
    """Value: one worker chooses its largest coefficients, and broadcasts their positions.

    Args:
      worker: the number of the worker that always leads; None lets worker t mod w lead at step t.

    Raises:
      ValueError: if the number is negative; while tracing, if there is no such worker.

    Example:
      >>> fg.SharedSupport(fg.TopK(k=10), support=fg.exchanges.LeaderSupport(worker=0))
      SharedSupport(codec=TopK(k=10), support=LeaderSupport(worker=0))

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125.
    """

    worker: int | None = None

    def __post_init__(self) -> None:
        if self.worker is not None and (not isinstance(self.worker, int) or self.worker < 0):
            raise ValueError(
                f"LeaderSupport(worker): must be the number of a worker, got {self.worker!r}; "
                "leave it "
                "out to let all lead in turn."
            )

    @property
    def sends_positions(self) -> bool:
        return True

    def score(self, z: jax.Array, kept: PyTree) -> jax.Array:
        return z

    def number(self, channel: Channel) -> jax.Array | int:
        """Which worker leads."""
        workers = channel.workers
        if self.worker is not None and self.worker >= workers:
            raise ValueError(
                f"LeaderSupport(worker): must be the number of one of {workers} workers, got "
                f"{self.worker}; leave it out to let all lead in turn."
            )
        return channel.step.number % workers if self.worker is None else self.worker

    def leads(self, channel: Channel) -> jax.Array:
        return channel.index == self.number(channel)

    def agree(self, sides: list[PyTree], channel: Channel) -> list[PyTree]:
        return channel.broadcast(sides, self.leads(channel))


class DriftState(NamedTuple):
    """What the means so far tell of a part's coefficients, equal on all workers.

    Attributes:
      rate: how much each one's mean grew a step, up to when it was last sent; -1 before.
      age: how many steps ago that was.
    """

    rate: jax.Array
    age: jax.Array


@dataclasses.dataclass(frozen=True)
class PredictedSupport(Support):
    """Value: all choose by the last means, which all have, so that no position travels.

    From the means so far each worker expects how much a coefficient has piled up since it was last
    sent, and all choose the k largest of

        (r_i + mean(r)) · a_i,

    r_i the size of its last mean over the steps that this was of, or the mean of the others where
    it was never sent, a_i the steps since; mean(r) is 1 until something other than zero has come.
    Nothing waits for ever. This is made for error feedback, without which nothing piles up, and
    finds what matters later than a leader does.

    Differs from the paper: this choice is ours.

    Example:
      >>> exchange = fg.SharedSupport(fg.TopK(k=10), fg.exchanges.PredictedSupport())
      >>> fg.wire_bytes(exchange, jnp.ones(1000))
      44
    """

    @property
    def sends_positions(self) -> bool:
        return False

    def init(self, likes: list[Like]) -> list[PyTree]:
        return [
            DriftState(jnp.full(like.shape, -1.0, jnp.float32), jnp.ones(like.shape, jnp.float32))
            for like in likes
        ]

    def score(self, z: jax.Array, kept: DriftState) -> jax.Array:
        known = jnp.isfinite(kept.rate) & (kept.rate >= 0)
        total = jnp.sum(jnp.where(known, kept.rate, 0.0))
        count = jnp.sum(known.astype(jnp.float32))
        # Not zero, or a selector that keeps no zeros would send nothing, for ever.
        usual = jnp.where(total > 0, total / jnp.maximum(count, 1.0), 1.0)
        return (jnp.where(known, kept.rate, usual) + usual) * kept.age

    def agree(self, sides: list[PyTree], channel: Channel) -> list[PyTree]:
        return sides

    def update(
        self, kept: DriftState, selector: Selector, side: PyTree, mean: jax.Array, step: Step
    ) -> DriftState:
        ones = selector.at(jnp.ones_like(kept.age), side, step)
        sent = selector.decompress(Payload(ones, side), spec(kept.age), step) > 0
        rate = jnp.where(sent, jnp.abs(mean) / kept.age, kept.rate)
        return DriftState(rate, jnp.where(sent, 1.0, kept.age + 1.0))
