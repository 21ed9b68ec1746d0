"""What neighbors tell each other of how their vectors moved.

A worker tells by how much what the others hold to be its vector lacks of it, compressed, and all
of them, itself among them, add what was told. Kept of it are two vectors, whatever the degree: the
worker's own public copy, and the pull of its neighbors, Σ_j W_ij (copy_j - copy_i). The pull, and
not the sum of copies, because near to consensus it is small, and so is what rounding adds to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree, Step
from fftgrad.exchanges import _alike, _counts, _graphs, _layout, _parts, _wire
from fftgrad.exchanges._graphs import Graph
from fftgrad.exchanges._layout import Bucket, Layout
from fftgrad.exchanges._parts import Likes, Parts, Payloads, Vectors
from fftgrad.exchanges._rules import Codecs


class Told(NamedTuple):
    """What comes of one exchange with the neighbors.

    Attributes:
      sent: of each tree, what all neighbors received of this worker's; zeros if it said nothing,
        because something it had to say was not finite.
      pull: of each tree, Σ_j W_ij (sent_j - sent_i); NaN where a buffer was altered, because what
        was told then is lost for good.
      skipped: how many of this worker and its neighbors said nothing, int32[].
      invalid: how many buffers were altered, int32[].
      overflow: how many of this worker's values its codecs could not represent, int32[].
      state: the codecs' next state.
    """

    sent: tuple[PyTree, ...]
    pull: tuple[PyTree, ...]
    skipped: jax.Array
    invalid: jax.Array
    overflow: jax.Array
    state: PyTree


class _Message(NamedTuple):
    """What a worker has to say of one bucket of each tree."""

    codec: Parts
    likes: Likes
    payloads: Payloads
    sent: Vectors
    step: Step


def init(codecs: Sequence[Codecs], like: PyTree, layout: Layout) -> PyTree:
    """The codecs' state before the first exchange of as many trees, all of them like this one."""
    buckets = _layout.bucket_likes(like, layout)
    return tuple(
        _codec_of(codecs, [bucket] * len(codecs)).init(_likes([bucket] * len(codecs)))
        for bucket in buckets
    )


def tell(
    codecs: Sequence[Codecs],
    trees: Sequence[PyTree],
    graph: Graph,
    state: PyTree,
    step: Step,
    axis_name: AxisName,
    layout: Layout,
) -> Told:
    """Trees alike, each with its codec, to the neighbors: in one buffer for each bucket."""
    workers = _axes.size(axis_name)
    neighbors = _graphs.checked(graph, workers)
    buckets = list(zip(*(_layout.to_buckets(_axes.whole(t), layout) for t in trees), strict=True))
    messages: list[_Message] = []
    overflow, after = jnp.int32(0), list[Any]()
    for i, bucket in enumerate(buckets):
        codec, likes, own = _codec_of(codecs, bucket), _likes(bucket), step.fold(i)
        out = codec.compress(_vectors(bucket), state[i], own)
        sent = _decode(codec, out.payloads, likes, own)
        messages.append(_Message(codec, likes, out.payloads, sent, own))
        overflow += jnp.asarray(out.overflow, jnp.int32)
        after.append(out.state)

    values = [v for bucket in buckets for v in _vectors(bucket)]
    values += [v for message in messages for v in message.sent]
    # Kept: every leaf of the state would find it again.
    finite = lax.optimization_barrier(_alike.all_finite(values))
    headers: list[_wire.Header] = []
    sents, pulls = list[list[Any]](), list[list[Any]]()
    for bucket, message in zip(buckets, messages, strict=True):
        codec, likes = message.codec, message.likes
        seed = _wire.seed(codec.codecs, likes, message.step)
        buffer = _wire.pack(_wire.Header(finite, overflow), message.payloads, seed)
        said = _counts.zero_unless(finite, message.sent)
        pull = tuple(jnp.zeros_like(vector) for vector in said)
        for neighbor in neighbors:
            words = _axes.permute(buffer, axis_name, neighbor.sources)
            header, payloads = _wire.unpack(words, codec.payload_spec(likes), seed)
            heard = _counts.zero_unless(
                header.finite, _decode(codec, payloads, likes, message.step)
            )
            # What an altered buffer said is lost, and the pull is wrong from then on.
            heard = _parts.poison_unless(jnp.asarray(header.valid), heard)
            pull = tuple(
                p + neighbor.weight * (theirs - own)
                for p, theirs, own in zip(pull, heard, said, strict=True)
            )
            headers.append(header)
        sents.append(_rebuild(said, bucket))
        pulls.append(_rebuild(pull, bucket))

    first = headers[: len(neighbors)]  # of the first bucket: a worker's say the same
    silent = [jnp.asarray(h.valid) & ~jnp.asarray(h.finite) for h in first]
    return Told(
        sent=_trees(sents, trees, layout),
        pull=_trees(pulls, trees, layout),
        skipped=sum((s.astype(jnp.int32) for s in silent), 1 - finite.astype(jnp.int32)),
        invalid=sum(((~jnp.asarray(h.valid)).astype(jnp.int32) for h in headers), jnp.int32(0)),
        overflow=jnp.where(finite, overflow, 0),
        state=_counts.kept_unless(finite, tuple(after), state),
    )


def _decode(codec: Parts, payloads: Payloads, likes: Likes, step: Step) -> Vectors:
    """What payloads stand for, to the same bits with the sender and all who hear it."""
    # Between barriers, or each side would fuse it with what comes before and after, and round
    # otherwise.
    payloads = lax.optimization_barrier(payloads)
    return lax.optimization_barrier(codec.decompress(payloads, likes, step))


def _codec_of(codecs: Sequence[Codecs], buckets: Sequence[Bucket]) -> Parts:
    pairs = zip(codecs, buckets, strict=True)
    return Parts(tuple(own for codec, b in pairs for own in _parts.codec_of(codec, b).codecs))


def _likes(buckets: Sequence[Bucket]) -> Likes:
    return tuple(like for bucket in buckets for like in _parts.vector_likes(bucket))


def _vectors(buckets: Sequence[Bucket]) -> Vectors:
    return tuple(vector for bucket in buckets for vector in _parts.vectors(bucket))


def _rebuild(flat: Vectors, buckets: Sequence[Bucket]) -> list[Any]:
    """The bucket of each tree, from the vectors of all."""
    left = iter(flat)
    return [_parts.rebuild([next(left) for _ in bucket], bucket) for bucket in buckets]


def _trees(buckets: list[list[Any]], trees: Sequence[PyTree], layout: Layout) -> tuple[Any, ...]:
    return tuple(
        _layout.from_buckets(_axes.whole([row[i] for row in buckets]), _layout.like(tree), layout)
        for i, tree in enumerate(trees)
    )
