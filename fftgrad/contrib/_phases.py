"""What is sent at the support: values while the autoencoder learns them, then its codes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import Channel, Payload, PyTree, Selector, Step, Tally
from fftgrad.codecs import _sum
from fftgrad.codecs._top_k import TopK
from fftgrad.contrib import _autoencoder
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import Likes, Parts, Payloads, Vectors
from fftgrad.exchanges._shared_support import leader_number
from fftgrad.ops import _finite, _shapes, _wire


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
    leader: int | None
    channel: Channel

    @property
    def number(self) -> jax.Array | int:
        """The number of the leader."""
        return leader_number("LearnedCodes", self.leader, self.channel)

    @property
    def own(self) -> jax.Array:
        """This worker's values at its own positions."""
        return jnp.concatenate([self.payloads[i].main for i in chosen(self.codec)])

    def agree(self, words: jax.Array) -> tuple[list[PyTree], jax.Array]:
        """The leader's positions, and its words, on all workers."""
        sides = [self.payloads[i].side for i in chosen(self.codec)]
        *sides, words = self.broadcast([*sides, words])
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
        pieces = _shapes.cut(values, [self.payloads[i].main.size for i in numbers])
        found = dict(zip(numbers, map(Payload, pieces, sides), strict=True))
        others = map(Payload, dense)
        payloads = (found[i] if i in found else next(others) for i in range(len(self.payloads)))
        return self.codec.decompress(tuple(payloads), self.likes, self.channel.step)

    def broadcast(self, tree: PyTree) -> PyTree:
        """The leader's arrays, on all workers."""
        return self.channel.broadcast(tree, self.channel.index == self.number)

    def means(self, *others: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The means of what travels dense, and of what goes along, in one all-reduce."""
        means, _ = self.channel.mean([*self.dense, *others])
        return means[: len(self.dense)], means[len(self.dense) :]

    def gather(self, message: PyTree) -> tuple[Any, Tally]:
        """The messages of all workers."""
        return self.channel.gather(message, of=self.vectors)


def chosen(codec: Parts) -> list[int]:
    """Which parts have a selector; the others travel dense."""
    return [i for i, part in enumerate(codec.codecs) if isinstance(part, Selector)]


CODE_DTYPE = jnp.bfloat16
"""Of the leader's code, which is broadcast and not added up."""


def learn(turn: Round, net: Autoencoder, params: PyTree, pick: TopK | None, rate: float) -> Outcome:
    """All get all values at the leader's positions, and the autoencoder learns them."""
    sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
    values = turn.at(sides)
    dense, _ = turn.means()
    rows, tally = turn.gather(values)
    workers = turn.channel.workers
    params, error = _autoencoder.learn(net, params, rows, turn.number, pick, rate)
    return Outcome(
        mean=jnp.sum(rows * (1.0 / workers), axis=0),
        sent=values,
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error[None],
        tally=tally,
    )


def code_by_leader(
    turn: Round, net: Autoencoder, params: PyTree, pick: TopK, error: jax.Array
) -> Outcome:
    """The leader sends a code of its values, and each worker what that lacks of its own."""
    code = net.encode(params, _autoencoder.scaled(turn.own).units).astype(CODE_DTYPE)
    sides, words = turn.agree(_wire.to_words(code))
    code = _wire.from_words(words, jax.ShapeDtypeStruct(code.shape, code.dtype))
    values = turn.at(sides)
    base = net.decode(params, code.astype(jnp.float32), values.size)
    dense, _ = turn.means()

    size, units = _autoencoder.scaled(values)
    payload = pick.compress(units - base, (), Step()).payload
    weight = net.weight(params)
    whole = base + weight * pick.decompress(payload, values, Step())
    gain = fit(units, whole, size)
    (gains, payloads), tally = turn.gather((gain[None], payload))

    scale = 1.0 / turn.channel.workers
    start = jnp.sum(gains * scale) * base
    added = Payload(payloads.main * (gains * weight), payloads.side)
    return Outcome(
        mean=_sum.add_each(pick, start, added, scale, Step()),
        sent=gain * whole,
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error,
        tally=tally,
    )


def code_by_sum(turn: Round, net: Autoencoder, params: PyTree, error: jax.Array) -> Outcome:
    """All send codes of their values at the leader's positions, and the mean code is decoded."""
    sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
    values = turn.at(sides)
    size, units = _autoencoder.scaled(values)
    code = net.encode(params, units)

    def decode(code: jax.Array) -> jax.Array:
        return net.decode(params, code, values.size)

    gain = fit(units, decode(code), size)
    flag = _finite.poison_unless(_finite.all_finite(turn.vectors))
    dense, (flag, total, codes) = turn.means(flag, gain, gain * code)
    center = codes / jnp.where(total > 0, total, 1.0)
    mean = decode(center)
    # To the first order in how far its code is from the mean one, what a worker sent: the terms
    # that it adds to the mean add up to nothing.
    _, own = jax.jvp(decode, (_axes.vary_like(center, code),), (code - center,))
    return Outcome(
        mean=total * mean,
        sent=gain * (mean + own),
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error,
        tally=Tally(finite=jnp.isfinite(flag)),
    )


def fit(wanted: jax.Array, found: jax.Array, size: jax.Array) -> jax.Array:
    """The factor, at least zero, by which what is found comes closest to `size` · wanted.

    Zero where there is none: what is sent is then nothing, and stays with its worker.
    """
    factor = size * (jnp.sum(wanted * found) / jnp.sum(jnp.square(found)))
    return jnp.where(jnp.isfinite(factor), jnp.maximum(factor, 0.0), 0.0)
