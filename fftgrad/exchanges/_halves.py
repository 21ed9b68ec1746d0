"""The two halves of a mean in two stages: shards to their owners, and what these have to all."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree, Step
from fftgrad.exchanges import _alike, _counts, _wire
from fftgrad.exchanges._all_gather import decode_mean
from fftgrad.exchanges._parts import Likes, Parts, Vectors
from fftgrad.ops import _finite


class Received(NamedTuple):
    """What the owner of a shard has of it.

    Attributes:
      headers: of the buffers that it got, stacked, but for the count: of those that count, a sum.
      means: of its shard of each part, over the workers.
      sent: what all owners got of this worker's shards, [w, size] of each part.
      state: of the worker's codecs, a row for each shard; the old one where it does not count.
    """

    headers: _wire.Header
    means: Vectors
    sent: Vectors
    state: PyTree


def to_owners(
    codec: Parts, rows: Vectors, before: PyTree, likes: Likes, step: Step, axis_name: AxisName
) -> Received:
    """Row i of each part [w, size], compressed, to worker i; the means of what came."""

    def to_owner(
        number: jax.Array, shards: Vectors, before: PyTree
    ) -> tuple[jax.Array, Vectors, PyTree]:
        return compress(codec, shards, before, likes, step.fold_local(number))

    numbers = jnp.arange(_axes.size(axis_name))
    buffers, sent, state = jax.vmap(to_owner)(numbers, rows, before)
    headers, means = decode_mean(codec, _axes.all_to_all(buffers, axis_name), likes, step)
    counted = _counts.zero_unless(_counts.which(headers.overflow, step), headers.overflow)
    return Received(
        headers._replace(overflow=jnp.sum(counted)),
        means,
        _counts.zero_unless(step.counts, sent),
        _counts.kept_unless(step.counts, state, before),
    )


def compress(
    codec: Parts,
    shards: Vectors,
    before: PyTree,
    likes: Likes,
    step: Step,
    received: _wire.Header = _wire.NOTHING,
) -> tuple[jax.Array, Vectors, PyTree]:
    """The buffer of a shard of each part, what they decode to, and the codecs' next state.

    Its header also tells of what was `received`: it counts that, and is finite and valid if all of
    that is.
    """
    out = codec.compress(shards, before, step)
    overflow = _counts.marked(received.overflow + out.overflow, step)
    finite = _alike.all_finite(shards) & jnp.all(received.finite)
    header = _wire.Header(finite, overflow, jnp.all(received.valid))
    sent = codec.decompress(out.payloads, likes, step)
    seed = _wire.seed(codec.codecs, likes, step)
    return _wire.pack(header, out.payloads, seed), sent, out.state


def to_all(
    codec: Parts, buffer: jax.Array, likes: Likes, step: Step, axis_name: AxisName
) -> tuple[_wire.Header, Vectors]:
    """What the buffers of all stand for, stacked, with their headers; NaN unless all are finite."""
    specs, seed = codec.payload_spec(likes), _wire.seed(codec.codecs, likes, step)

    def row(words: jax.Array) -> tuple[_wire.Header, Vectors]:
        header, payloads = _wire.unpack(words, specs, seed)
        return header, codec.decompress(payloads, likes, step)

    headers, shards = jax.vmap(row)(_axes.all_gather(buffer, axis_name))
    poison = _finite.poison_unless(jnp.all(headers.finite))
    return headers, tuple(rows + poison for rows in shards)
