"""The two halves of a mean in two stages: shards to their owners, and what these have to all."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Channel, PyTree, Tally
from fftgrad.exchanges._parts import CompressedParts, Likes, Parts, Vectors


class Half(NamedTuple):
    """What comes of one half.

    Attributes:
      vectors: of each part: on the owner of a shard its mean over the workers; or the shards of
        all owners, [w, size].
      sent: what the others received of this worker's rows; of a shard its row of `vectors` says it.
      state: the codecs' next state.
      tally: of the headers.
    """

    vectors: Vectors
    sent: Vectors
    state: PyTree
    tally: Tally


def to_owners(codec: Parts, rows: Vectors, state: PyTree, likes: Likes, channel: Channel) -> Half:
    """Row i of each part [w, size], compressed, to worker i, which averages what comes."""

    def one(number: jax.Array, shards: Vectors, state: PyTree) -> tuple[CompressedParts, Vectors]:
        out = codec.compress(shards, state, channel.step.fold_local(number))
        return out, codec.decompress(out.payloads, likes, channel.step)

    out, sent = jax.vmap(one)(jnp.arange(channel.workers), rows, state)
    got, tally = channel.scatter(out.payloads, of=rows, overflow=out.overflow)
    means = codec.mean(got, likes, tally.poison, channel.step, shards=True)
    return Half(means, sent, out.state, tally)


def to_all(
    codec: Parts,
    shards: Vectors,
    state: PyTree,
    likes: Likes,
    channel: Channel,
    received: Tally = Tally(),
) -> Half:
    """A shard of each part, compressed, to all; the shards of all owners, NaN unless all is finite.

    The headers also say what the owners were sent before.
    """
    step = channel.step
    out = codec.compress(shards, state, step)
    got, tally = channel.gather(out.payloads, of=shards, overflow=out.overflow, received=received)
    every = jax.vmap(lambda payloads: codec.decompress(payloads, likes, step))(got)
    rows = tuple(vectors + tally.poison for vectors in every)
    return Half(rows, (), out.state, tally)
