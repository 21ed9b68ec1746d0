"""What is sent at the support: values while the autoencoder learns them, then its codes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Payload, PyTree, Selector, Step
from fftgrad.codecs import _sum
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.contrib import _autoencoder
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.exchanges import _alike, _counts, _parts, _wire
from fftgrad.exchanges._parts import Likes, Parts, Payloads, Vectors
from fftgrad.exchanges._supports import LeaderSupport
from fftgrad.ops import _finite
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


CODE_DTYPE = jnp.bfloat16
"""Of the leader's code, which is broadcast and not added up."""


def learn(turn: Round, net: Autoencoder, params: PyTree, pick: TopK | None, rate: float) -> Outcome:
    """All get all values at the leader's positions, and the autoencoder learns them."""
    sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
    values = turn.at(sides)
    dense, _ = turn.means()
    headers, rows = turn.gather(values)
    workers = _axes.size(turn.axis_name)
    lead = turn.leader.number(turn.step, turn.axis_name)
    params, error = _autoencoder.learn(net, params, rows, lead, pick, rate)
    return Outcome(
        mean=jnp.sum(rows * (1.0 / workers), axis=0),
        sent=values,
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error[None],
        **_told(headers, turn),
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
    headers, (gains, payloads) = turn.gather((gain[None], payload))

    scale = 1.0 / _axes.size(turn.axis_name)
    start = jnp.sum(gains * scale) * base
    added = Payload(payloads.main * (gains * weight), payloads.side)
    return Outcome(
        mean=_sum.add_each(pick, start, added, scale, Step()),
        sent=gain * whole,
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error,
        **_told(headers, turn),
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
    flag = _finite.poison_unless(_alike.all_finite(turn.vectors))
    who = _counts.term(turn.step, turn.axis_name)
    dense, (flag, total, codes, *told) = turn.means(flag, gain, gain * code, *who)
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
        finite=jnp.isfinite(flag),
        workers=_counts.number(told),
        invalid=jnp.int32(0),
    )


def fit(wanted: jax.Array, found: jax.Array, size: jax.Array) -> jax.Array:
    """The factor, at least zero, by which what is found comes closest to `size` · wanted.

    Zero where there is none: what is sent is then nothing, and stays with its worker.
    """
    factor = size * (jnp.sum(wanted * found) / jnp.sum(jnp.square(found)))
    return jnp.where(jnp.isfinite(factor), jnp.maximum(factor, 0.0), 0.0)


def _told(headers: _wire.Header, turn: Round) -> dict[str, Any]:
    """What the headers of all workers tell."""
    return {
        "finite": jnp.all(headers.finite),
        "workers": _counts.read(headers.overflow, turn.step)[1],
        "invalid": _wire.count_invalid(headers),
    }
