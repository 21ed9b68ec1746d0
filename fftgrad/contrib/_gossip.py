"""What neighbors tell each other of how their vectors moved.

A worker sends the compressed difference between its vector and its neighbors' copy of it, and
everyone, itself too, adds that to the copy. It keeps three vectors, whatever the degree: its own
public copy, the pull of its neighbors, Σ_j (copy_j - copy_i), and what rounding dropped of the
pull. Over all workers the pulls sum to zero; without the dropped rest they would not, and a method
that adds up pulls, as `beer` does, would drift away from its optimum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Channel, PyTree, Step
from fftgrad.contrib import _graphs
from fftgrad.contrib._graphs import Graph
from fftgrad.exchanges import _layout, _parts
from fftgrad.exchanges._layout import Bucket, Join, Layout
from fftgrad.exchanges._parts import Likes, Parts, Vectors
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _count, _finite, _norms, _rounding, _wire


class Told(NamedTuple):
    """What comes of one exchange with the neighbors.

    Attributes:
      sent: of each tree, what all neighbors received of this worker's; zeros if it said nothing,
        because something it had to say was not finite.
      pull: of each tree, Σ_j (sent_j - sent_i) over the neighbors j.
      rest: of each tree, what rounding drops of the pull.
      skipped: how many of this worker and its neighbors said nothing, int32[].
      overflow: how many of this worker's values its codecs could not represent, int32[].
      state: the codecs' next state.
    """

    sent: tuple[PyTree, ...]
    pull: tuple[PyTree, ...]
    rest: tuple[PyTree, ...]
    skipped: jax.Array
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
    channel: Channel,
    layout: Layout,
) -> Told:
    """Trees alike, each with its codec, to the neighbors: in one buffer for each bucket."""
    neighbors = _graphs.checked(graph, channel.workers)
    split, joins = zip(*(_layout.to_buckets(_axes.whole(t), layout) for t in trees), strict=True)
    buckets = list(zip(*split, strict=True))
    # Kept: every leaf of the state would find it again.
    values = [vector for bucket in buckets for vector in _vectors(bucket)]
    finite = lax.optimization_barrier(_finite.all_finite(values))
    overflow, silent = jnp.int32(0), jnp.int32(0)
    after, added = list[PyTree](), list[tuple[list[Any], ...]]()
    for i, bucket in enumerate(buckets):
        codec, likes, own = _codec_of(codecs, bucket), _likes(bucket), channel.step.fold(i)
        out = codec.compress(_vectors(bucket), state[i], own)
        header = _wire.Header(finite, out.overflow)
        payloads = _wire.without_gradient(out.payloads, _vectors(bucket))
        buffer = _wire.pack(header, payloads)
        heard = [_axes.permute(buffer, channel.axis_name, sources) for sources in neighbors]
        headers, sums = _add(codec, jnp.stack([buffer, *heard]), likes, own)
        silent = jnp.sum(~jnp.asarray(headers.finite), dtype=jnp.int32)
        overflow = _count.add(overflow, out.overflow)
        after.append(out.state)
        added.append(tuple(_rebuild(flat, bucket) for flat in sums))
    sent, pull, rest = (_trees([row[k] for row in added], joins) for k in range(len(_Sums._fields)))
    return Told(
        sent=sent,
        pull=pull,
        rest=rest,
        skipped=silent,
        overflow=jnp.where(finite, overflow, 0),
        state=optax.tree.where(finite, tuple(after), state),
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
    like = codec.payload_spec(likes)

    def add(sums: _Sums, row: Any) -> tuple[_Sums, _wire.Header]:
        is_own, words = row
        header, payloads = _wire.unpack(words, like)
        vectors = _settled(codec.decompress(payloads, likes, step), header)
        said = optax.tree.where(is_own, vectors, sums.said)
        # Of two neighbors one has the negative of what the other has, to the bit. Weights are for
        # later: a product could become part of a sum, without the rounding of its own.
        draws = [theirs - own for theirs, own in zip(vectors, said, strict=True)]
        both = [_rounding.two_sum(*pair) for pair in zip(sums.pull, draws, strict=True)]
        rest = tuple(r + lost for r, (_, lost) in zip(sums.rest, both, strict=True))
        return _Sums(said, tuple(total for total, _ in both), rest), header

    zeros = tuple(_axes.vary_like(jnp.zeros(n.shape, n.dtype), buffers) for n in likes)
    is_own = jnp.arange(len(buffers)) == 0
    sums, headers = lax.scan(add, _Sums(zeros, zeros, zeros), (is_own, buffers))
    return headers, sums


def _settled(vectors: Vectors, header: _wire.Header) -> Vectors:
    """What was said, rounded; zeros where it was not finite.

    As bits, because a compiler may put the last product of a codec and the difference that follows
    into one operation, which rounds once where the neighbor's rounds twice.
    """
    keep = jnp.where(header.finite, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    bits = (lax.bitcast_convert_type(vector, jnp.uint32) for vector in vectors)
    return tuple(lax.bitcast_convert_type(b & keep, jnp.float32) for b in bits)


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


def _trees(buckets: list[list[Any]], joins: Sequence[Join]) -> tuple[Any, ...]:
    return tuple(join(_axes.whole([row[i] for row in buckets])) for i, join in enumerate(joins))


def consensus_distance(params: PyTree, axis_name: AxisName | None = None) -> jax.Array:
    """Function: how far apart the workers' parameters are, where they differ.

    √(Σ_i ||x_i - x̄||² / w), with x_i all parameters of worker i of w and x̄ their mean: the root
    mean square distance from the mean. It is 0.0 where all are equal, and NaN where one is not
    finite. Beside `||x̄||` it says whether gossip keeps up with training.

    Args:
      params: without `axis_name`, the parameters of all workers, each leaf with a leading axis of
        workers; with it, the worker's own.
      axis_name: the axis, or axes, of the workers, to call it inside them.

    Returns:
      float32[], the same on all workers.

    Wire: with `axis_name`, a dense all-reduce of the parameters and two of 4 bytes: for now and
      then. Without it, what JAX needs to take the mean of a sharded axis.

    Raises:
      ValueError: while tracing, if the axis is not bound.

    Example:
      >>> rows = {"w": jnp.array([[0.0, 1.0], [2.0, 1.0]])}
      >>> fg.contrib.gossip.consensus_distance(rows).item()
      1.0
      >>> mine = lambda own: fg.contrib.gossip.consensus_distance(own, "data")
      >>> jax.vmap(mine, axis_name="data")(rows).tolist()
      [1.0, 1.0]
    """
    wide = jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), params)
    if axis_name is None:
        workers = next((len(leaf) for leaf in jax.tree.leaves(wide)), 1)
        apart = jax.tree.map(lambda a: a - jnp.mean(a, axis=0, keepdims=True), wide)
        unit = _norms.unit_for(_norms.top(apart))
        return unit * jnp.sqrt(_norms.square(apart, unit) / workers)
    _axes.size(axis_name, "consensus_distance")
    varied = jax.tree.map(lambda a: _axes.vary(a, axis_name), wide)
    apart = jax.tree.map(lambda a: a - lax.pmean(a, axis_name), varied)
    unit = _norms.unit_for(lax.pmax(_norms.top(apart), axis_name))
    unit = _axes.over_other_axes(lax.pmax, unit)
    square = lax.pmean(_norms.square(apart, unit), axis_name)
    return unit * jnp.sqrt(_axes.over_other_axes(lax.psum, square))
