"""What the phases of an exchange with a learned code have in common: who sends what to whom."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Payload, PyTree, Selector, Step
from fftgrad.exchanges import _alike, _counts, _parts, _wire
from fftgrad.exchanges._parts import Likes, Parts, Payloads, Vectors
from fftgrad.exchanges._supports import LeaderSupport
from fftgrad.ops._shapes import spec


class Outcome(NamedTuple):
    """What a phase comes to.

    Attributes:
      mean: of the values at the support, float32[k].
      sent: what the others received of this worker's.
      dense: the means of the parts that travel dense.
      sides: the positions of each other part.
      autoencoder: its next parameters.
      error: its relative error, float32[1].
      finite: whether all workers had finite values.
      workers: how many count, or None.
      invalid: how many buffers were altered.
    """

    mean: jax.Array
    sent: jax.Array
    dense: list[jax.Array]
    sides: list[PyTree]
    autoencoder: PyTree
    error: jax.Array
    finite: jax.Array
    workers: jax.Array | None
    invalid: jax.Array


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of one worker: what it selected, and how it talks to the others."""

    codec: Parts
    likes: Likes
    vectors: Vectors
    payloads: Payloads
    leader: LeaderSupport
    step: Step
    axis_name: AxisName

    @property
    def own(self) -> jax.Array:
        """This worker's values at its own positions."""
        return jnp.concatenate([self.payloads[i].main for i in chosen(self.codec)])

    def agree(self, words: jax.Array) -> tuple[list[PyTree], jax.Array]:
        """The leader's positions, and its words, on all workers."""
        sides = [self.payloads[i].side for i in chosen(self.codec)]
        *sides, words = self.leader.agree([*sides, words], self.step, self.axis_name)
        return sides, words

    def at(self, sides: list[PyTree]) -> jax.Array:
        """This worker's values at the leader's positions."""
        found: list[jax.Array] = []
        for i, side in zip(chosen(self.codec), sides, strict=True):
            selector: Any = self.codec.codecs[i]
            own = _parts._own(self.step, jnp.int32(i))
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
        pieces = _parts.cut(values, [self.payloads[i].main.size for i in numbers])
        found = dict(zip(numbers, map(Payload, pieces, sides), strict=True))
        others = map(Payload, dense)
        payloads = (found[i] if i in found else next(others) for i in range(len(self.payloads)))
        return self.codec.decompress(tuple(payloads), self.likes, self.step)

    def broadcast(self, tree: PyTree) -> PyTree:
        """The leader's arrays, on all workers."""
        leaves, structure = jax.tree.flatten(tree)
        whole, restore = _parts.as_one(leaves)
        leads = self.leader.leads(self.step, self.axis_name)
        whole = lax.psum(jnp.where(leads, whole, 0.0), self.axis_name)
        return jax.tree.unflatten(structure, restore(whole))

    def means(self, *others: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The means of what travels dense, and of what goes along, in one all-reduce."""
        terms = [*self.dense, *others]
        if not terms:
            return [], []
        # Divided first, so that no sum of finite values overflows.
        whole, restore = _parts.as_one(terms)
        means = restore(lax.psum(whole * (1.0 / _axes.size(self.axis_name)), self.axis_name))
        return means[: len(self.dense)], means[len(self.dense) :]

    def gather(self, message: PyTree) -> tuple[_wire.Header, PyTree]:
        """The messages of all workers, stacked, and the headers of their buffers."""
        finite = _alike.all_finite(self.vectors)
        header = _wire.Header(finite, _counts.marked(jnp.int32(0), self.step))
        seed = _wire.seed(self.codec.codecs, self.likes, self.step)
        buffers = _axes.all_gather(_wire.pack(header, message, seed), self.axis_name)
        return jax.vmap(lambda words: _wire.unpack(words, spec(message), seed))(buffers)


def chosen(codec: Parts) -> list[int]:
    """Which parts have a selector; the others travel dense."""
    return [i for i, part in enumerate(codec.codecs) if isinstance(part, Selector)]
