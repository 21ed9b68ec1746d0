"""What the phases of an exchange with a learned code have in common: who sends what to whom."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._channel import Received
from fftgrad._contracts import Channel, Payload, PyTree, Selector, Tally
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import Likes, Parts, Payloads, Vectors
from fftgrad.exchanges._supports import LeaderSupport
from fftgrad.ops import _joined


class Outcome(NamedTuple):
    """What a phase comes to.

    Attributes:
      mean: of the values at the support, float32[k].
      sent: what the others received of this worker's.
      dense: the means of the parts that travel dense.
      sides: the positions of each other part.
      autoencoder: its next parameters.
      error: its relative error, float32[1].
      tally: of the sum or the buffers that say so.
    """

    mean: jax.Array
    sent: jax.Array
    dense: list[jax.Array]
    sides: list[PyTree]
    autoencoder: PyTree
    error: jax.Array
    tally: Tally


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of one worker: what it selected, and how it talks to the others."""

    codec: Parts
    likes: Likes
    vectors: Vectors
    payloads: Payloads
    leader: LeaderSupport
    channel: Channel

    @property
    def own(self) -> jax.Array:
        """This worker's values at its own positions."""
        return jnp.concatenate([self.payloads[i].main for i in chosen(self.codec)])

    def agree(self, words: jax.Array) -> tuple[list[PyTree], jax.Array]:
        """The leader's positions, and its words, on all workers."""
        sides = [self.payloads[i].side for i in chosen(self.codec)]
        *sides, words = self.leader.agree([*sides, words], self.channel)
        return sides, words

    def at(self, sides: list[PyTree]) -> jax.Array:
        """This worker's values at the leader's positions."""
        found: list[jax.Array] = []
        for i, side in zip(chosen(self.codec), sides, strict=True):
            selector: Any = self.codec.codecs[i]
            own = _parts._own(self.channel.step, jnp.int32(i))
            found.append(selector.at(self.vectors[i], side, own))
        return jnp.concatenate(found)

    @property
    def dense(self) -> list[jax.Array]:
        """What travels dense."""
        keep = set(range(len(self.payloads))).difference(chosen(self.codec))
        return [self.payloads[i].main for i in sorted(keep)]

    def whole(self, values: jax.Array, dense: list[jax.Array], sides: list[PyTree]) -> Vectors:
        """All parts, of the values at the leader's positions and of what travels dense."""
        numbers = chosen(self.codec)
        pieces = _joined.cut(values, [self.payloads[i].main.size for i in numbers])
        found = dict(zip(numbers, map(Payload, pieces, sides), strict=True))
        others = map(Payload, dense)
        payloads = (found[i] if i in found else next(others) for i in range(len(self.payloads)))
        return self.codec.decompress(tuple(payloads), self.likes, self.channel.step)

    def broadcast(self, tree: PyTree) -> PyTree:
        """The leader's arrays, on all workers."""
        return self.channel.broadcast(tree, self.leader.leads(self.channel))

    def means(
        self, *others: jax.Array, tallied: bool = False
    ) -> tuple[list[jax.Array], list[jax.Array], Tally]:
        """The means of what travels dense, and of what goes along, in one all-reduce."""
        means, tally = self.channel.mean([*self.dense, *others], tallied=tallied)
        return means[: len(self.dense)], means[len(self.dense) :], tally

    def gather(self, message: PyTree) -> Received:
        """The messages of all workers."""
        return self.channel.gather(message, self.codec.number(self.likes), of=self.vectors)


def chosen(codec: Parts) -> list[int]:
    """Which parts have a selector; the others travel dense."""
    return [i for i, part in enumerate(codec.codecs) if isinstance(part, Selector)]
