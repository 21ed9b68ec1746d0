"""What neighbors tell each other of how their vectors moved.

A worker tells by how much what the others hold to be its vector lacks of it, compressed, and all
of them, itself among them, add what was told. Kept of it are three vectors, whatever the degree:
the worker's own public copy, the pull of its neighbors, Σ_j (copy_j - copy_i), and what rounding
dropped of the pull. Over all workers pulls sum to zero. Where rounding kept a rest of that
for good, a method that adds up pulls, as `beer` does, would drift away from its optimum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree, Step
from fftgrad.contrib import _graphs
from fftgrad.contrib._graphs import Graph
from fftgrad.exchanges import _alike, _counts, _layout, _parts, _wire
from fftgrad.exchanges._layout import Bucket, Layout
from fftgrad.exchanges._parts import Likes, Parts, Vectors
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _two_sum


class Told(NamedTuple):
    """What comes of one exchange with the neighbors.

    Attributes:
      sent: of each tree, what all neighbors received of this worker's; zeros if it said nothing,
        because something it had to say was not finite.
      pull: of each tree, Σ_j (sent_j - sent_i) over the neighbors j; NaN where a buffer was
        altered, because what was told then is lost for good.
      rest: of each tree, what rounding drops of the pull.
      skipped: how many of this worker and its neighbors said nothing, int32[].
      invalid: how many buffers were altered, int32[].
      overflow: how many of this worker's values its codecs could not represent, int32[].
      state: the codecs' next state.
    """

    sent: tuple[PyTree, ...]
    pull: tuple[PyTree, ...]
    rest: tuple[PyTree, ...]
    skipped: jax.Array
    invalid: jax.Array
    overflow: jax.Array
    state: PyTree


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
    neighbors = _graphs.checked(graph, _axes.size(axis_name))
    buckets = list(zip(*(_layout.to_buckets(_axes.whole(t), layout) for t in trees), strict=True))
    # Kept: every leaf of the state would find it again.
    values = [vector for bucket in buckets for vector in _vectors(bucket)]
    finite = lax.optimization_barrier(_alike.all_finite(values))
    overflow, invalid, silent = jnp.int32(0), jnp.int32(0), jnp.int32(0)
    after, added = list[PyTree](), list[tuple[list[Any], ...]]()
    for i, bucket in enumerate(buckets):
        codec, likes, own = _codec_of(codecs, bucket), _likes(bucket), step.fold(i)
        out = codec.compress(_vectors(bucket), state[i], own)
        seed = _wire.seed(codec.codecs, likes, own)
        header = _wire.Header(finite, out.overflow)
        buffer = _wire.pack(header, out.payloads, seed)
        heard = [_axes.permute(buffer, axis_name, sources) for sources in neighbors]
        headers, sums = _add(codec, jnp.stack([buffer, *heard]), likes, own)
        is_valid = jnp.asarray(headers.valid)
        invalid += jnp.sum(~is_valid, dtype=jnp.int32)
        silent = jnp.sum(is_valid & ~jnp.asarray(headers.finite), dtype=jnp.int32)
        overflow += jnp.asarray(out.overflow, jnp.int32)
        after.append(out.state)
        added.append(tuple(_rebuild(flat, bucket) for flat in sums))
    sent, pull, rest = (
        _trees([row[k] for row in added], trees, layout) for k in range(len(_Sums._fields))
    )
    return Told(
        sent=sent,
        pull=pull,
        rest=rest,
        skipped=silent,
        invalid=invalid,
        overflow=jnp.where(finite, overflow, 0),
        state=_counts.kept_unless(finite, tuple(after), state),
    )


class _Sums(NamedTuple):
    """Of each part: what this worker said, and the pull, as it is rounded and what that drops."""

    said: Vectors
    pull: Vectors
    rest: Vectors


def _add(codec: Parts, buffers: jax.Array, likes: Likes, step: Step) -> tuple[_wire.Header, _Sums]:
    """The headers of this worker's buffer and its neighbors', and what comes of them.

    In one loop, so that each worker decodes to the same bits, whoever does it.
    """
    like, seed = codec.payload_spec(likes), _wire.seed(codec.codecs, likes, step)

    def add(sums: _Sums, row: Any) -> tuple[_Sums, _wire.Header]:
        is_own, words = row
        header, payloads = _wire.unpack(words, like, seed)
        vectors = _settled(codec.decompress(payloads, likes, step), header)
        said = _parts.where(is_own, vectors, sums.said)
        # Of two neighbors one has the negative of what the other has, to the bit. Weights are for
        # later: a product could become part of a sum, without the rounding of its own.
        draws = [theirs - own for theirs, own in zip(vectors, said, strict=True)]
        both = [_two_sum.two_sum(*pair) for pair in zip(sums.pull, draws, strict=True)]
        rest = tuple(r + lost for r, (_, lost) in zip(sums.rest, both, strict=True))
        return _Sums(said, tuple(total for total, _ in both), rest), header

    zeros = tuple(_axes.vary_like(jnp.zeros(n.shape, n.dtype), buffers) for n in likes)
    is_own = jnp.arange(len(buffers)) == 0
    sums, headers = lax.scan(add, _Sums(zeros, zeros, zeros), (is_own, buffers))
    return headers, sums


def _settled(vectors: Vectors, header: _wire.Header) -> Vectors:
    """What was said, rounded; zeros where it was not finite, NaN where it was altered.

    An altered buffer said something that is lost, and the pull is wrong from then on. As bits,
    because a compiler may put the last product of a codec and the difference that follows into one
    operation, which rounds once where the neighbor's rounds twice.
    """
    keep = jnp.where(header.finite, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    spoil = jnp.where(header.valid, jnp.uint32(0), jnp.uint32(0x7FC00000))
    bits = (lax.bitcast_convert_type(vector, jnp.uint32) for vector in vectors)
    return tuple(lax.bitcast_convert_type((b & keep) | spoil, jnp.float32) for b in bits)


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
