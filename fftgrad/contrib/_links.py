"""Exchange of a worker with its neighbors on a graph.

Worker i sends C(x_i - copy_i) to its neighbors, with copy_i the copy of x_i that they know. They
and worker i add this difference to the copy. For any number of neighbors, worker i stores three
vectors: copy_i, its pull Σ_j (copy_j - copy_i) over the neighbors j, and the rounding error of the
pull. With the rounding errors, the pulls of all workers sum to zero. Without them, `beer` would
drift from the optimum, because it accumulates pulls. For unequal weights, each term of the pull is
multiplied by W_ij over the largest weight of any neighbor.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Comm, PyTree, Step
from fftgrad._values import brief, check, check_within
from fftgrad.exchanges import _bucketing, _parts
from fftgrad.exchanges._bucketing import Bucket, Bucketing, Join
from fftgrad.exchanges._parts import Codecs, Parts, Vectors
from fftgrad.exchanges._shards import PerWorker, Reset, add_worker_axis, drop_worker_axis
from fftgrad.ops import _count, _finite, _rounding, _wire
from fftgrad.ops._random import check_key
from fftgrad.optimizers._diloco import check_own
from fftgrad.training._gradients import check_local, refuse_masked, refuse_weight, stands_in

Weights = npt.NDArray[np.float64]


class Graph(NamedTuple):
    """Matrix of weights, decomposed into permutations. Each permutation is one collective.

    A worker with fewer neighbors than others also receives from itself, without effect.
    """

    largest: float  # largest weight of a neighbor; 0.0 without neighbors
    sources: list[tuple[int, ...]]  # for each permutation, the sender to each worker
    shares: npt.NDArray[np.float32]  # weight / largest, for each permutation and worker


def graph_of(owner: str, weights: npt.ArrayLike) -> Graph:
    """Check that a matrix is symmetric and doubly stochastic, and decompose it."""
    w = np.asarray(weights, np.float64)
    square = w.ndim == 2 and w.shape[0] == w.shape[1] > 0
    fine = square and w.min() >= 0 and np.allclose(w, w.T) and np.allclose(w.sum(1), 1)
    rule = "be a symmetric matrix [workers, workers] of weights >= 0 with rows that sum to 1"
    check(fine, f"{owner}(weights)", rule, brief(weights), "use gossip.ring(workers).")
    others = w * (1 - np.eye(len(w)))
    largest = float(others.max())
    sources = _permutations(others > 0)
    rows = [others[np.arange(len(w)), list(heard)] / largest for heard in sources]
    # If weights are equal up to rounding, their shares must be exactly 1.
    shares = np.reshape(rows, (len(rows), len(w)))
    shares = np.where(np.isclose(shares, 1), 1, shares).astype(np.float32)
    return Graph(largest, sources, shares)


def _permutations(hears: npt.NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Decompose an adjacency matrix into as many permutations as its largest degree.

    If a worker has fewer neighbors than others, edges to itself make the degrees equal. Then the
    matrix is a sum of permutations. Augmenting paths find each permutation as a matching.
    """
    workers, degrees = len(hears), hears.sum(1)
    left = hears.astype(int) + np.diag(degrees.max() - degrees)
    near = [
        sorted(range(workers), key=lambda j: (min((j - i) % workers, (i - j) % workers), j < i, j))
        for i in range(workers)
    ]
    found: list[tuple[int, ...]] = []
    for _ in range(int(degrees.max())):
        heard_by: dict[int, int] = {}

        def place(i: int, tried: set[int], heard_by: dict[int, int] = heard_by) -> bool:
            for j in near[i]:
                if left[i, j] and j not in tried:
                    tried.add(j)
                    if j not in heard_by or place(heard_by[j], tried):
                        heard_by[j] = i
                        return True
            return False

        for i in range(workers):
            place(i, set())
        sources = {i: j for j, i in heard_by.items()}
        found.append(tuple(sources[i] for i in range(workers)))
        left[np.arange(workers), found[-1]] -= 1
    return found


class Copied(NamedTuple):
    """A float32 tree that the neighbors copy."""

    copy: PyTree  # the neighbors' copy of this worker's tree
    pull: PyTree  # Σ_j (copy_j - copy_i) over the neighbors j
    rest: PyTree  # rounding error of the pull


class Links(NamedTuple):
    """A worker's state of the exchange with its neighbors."""

    trees: tuple[Copied, ...]
    codecs: PyTree  # states of the codecs
    skipped: jax.Array  # buffers of this worker and its neighbors that were not finite
    overflow: jax.Array  # values of this worker that no codec could represent


@dataclasses.dataclass
class Gossip:
    """Checked arguments of an optimizer that exchanges with neighbors."""

    owner: str
    codecs: tuple[Codecs, ...]
    weights: dataclasses.InitVar[npt.ArrayLike]
    gamma: float
    key: jax.Array | int
    axis_name: AxisName
    bucketing: Bucketing

    def __post_init__(self, weights: npt.ArrayLike) -> None:
        owner, scope = self.owner, self.bucketing.scope or _parts.scope_of(self.codecs[-1])
        for codec in self.codecs:
            _parts.check_codec(owner, codec)
        remedy = "use 0.5, or 1.0 for a lossless codec."
        check_within(f"{owner}(gamma)", self.gamma, "(0, 1]", remedy)
        _axes.check_names(f"{owner}(axis_name)", self.axis_name)
        check_key(f"{owner}(key)", self.key)
        self.bucketing = Bucketing(scope, self.bucketing.bucket_bytes)
        self.graph = graph_of(owner, weights)

    def init(self, copies: Sequence[PyTree], params: PyTree) -> PerWorker:
        """Return the state before the first step. All workers start with the same `copies`.

        For another graph or number of workers, make a new state.
        """
        zero = jnp.zeros((), jnp.int32)
        zeros = jax.tree.map(jnp.zeros_like, copies[0])
        trees = tuple(Copied(copy, zeros, zeros) for copy in copies)
        if stands_in(params):  # placeholders, for which no codec has a state
            return add_worker_axis(Reset(Links(trees, zero, zero, zero)))
        buckets = [
            [one] * len(self.codecs) for one in _bucketing.bucket_likes(copies[0], self.bucketing)
        ]
        codecs = tuple(_codec_of(self.codecs, bucket).init() for bucket in buckets)
        return add_worker_axis(Reset(Links(trees, codecs, zero, zero)))

    def checked(self, updates: PyTree, params: PyTree | None, **extra: Any) -> PyTree:
        """Check that the parameters and the gradients are this worker's own."""
        refuse_masked(updates, self.owner, "")
        refuse_weight(self.owner, extra.get("weight"), "neighbors average parameters")
        check_local(updates, self.axis_name, self.owner)
        workers, rows = _axes.size(self.axis_name, self.owner), self.graph.shares.shape[1]
        rule, remedy = f"have a row for each of {workers} workers", f"use gossip.ring({workers})."
        check(workers == rows, f"{self.owner}(weights)", rule, rows, remedy)
        remedy = "call tx.update(grads, state, params)."
        argument = f"{self.owner}.update(params)"
        check(params is not None, argument, "be parameters", "None", remedy)
        check_own(self.owner, params, self.axis_name)
        return params

    def tell(
        self, trees: Sequence[PyTree], state: PerWorker, number: jax.Array
    ) -> tuple[tuple[Copied, ...], PerWorker]:
        """Send the differences of trees and copies to the neighbors, in one buffer for each bucket.

        Return the next copies and pulls, and the next state.
        """
        before: Links = drop_worker_axis(state).reset_rows
        lacks = [
            jax.tree.map(jnp.subtract, tree, old.copy)
            for tree, old in zip(trees, before.trees, strict=True)
        ]
        graph, comm = self.graph, Comm.of(self.axis_name, self.key, number)
        shares = jnp.concatenate([jnp.ones(1), jnp.asarray(graph.shares)[:, comm.index]])
        found = (_bucketing.to_buckets(_axes.whole(tree), self.bucketing) for tree in lacks)
        split, joins = zip(*found, strict=True)
        buckets = list(zip(*split, strict=True))
        # Without the barrier, XLA would recompute the flag for every leaf of the state.
        values = [vector for bucket in buckets for vector in _vectors(bucket)]
        finite = lax.optimization_barrier(_finite.all_finite(values))
        overflow, silent = jnp.int32(0), jnp.int32(0)
        states, added = list[PyTree](), list[tuple[list[Any], ...]]()
        for i, bucket in enumerate(buckets):
            codec, own = _codec_of(self.codecs, bucket), comm.step.fold(i)
            out = codec.compress(_vectors(bucket), before.codecs[i], own)
            payloads = _wire.without_gradient(out.payloads, _vectors(bucket))
            buffer = _wire.pack(payloads, finite, out.overflow)
            heard = [_axes.permute(buffer, comm.axis_name, sources) for sources in graph.sources]
            buffers = jnp.stack([buffer, *heard])
            finites, sums = _add(codec, buffers, own, shares, np.all(graph.shares == 1))
            silent = jnp.sum(~finites & (shares > 0), dtype=jnp.int32)
            overflow = _count.add(overflow, out.overflow)
            states.append(out.state)
            added.append(tuple(_rebuild(flat, bucket) for flat in sums))
        news = (_trees([row[k] for row in added], joins) for k in range(len(_Sums._fields)))
        after = tuple(_moved(*new) for new in zip(before.trees, *news, strict=True))
        links = Links(
            trees=after,
            codecs=optax.tree.where(finite, tuple(states), before.codecs),
            skipped=_count.add(before.skipped, silent),
            overflow=_count.add(before.overflow, jnp.where(finite, overflow, 0)),
        )
        return after, add_worker_axis(Reset(links))

    def drawn(self, moves: PyTree, tree: Copied) -> PyTree:
        """Add γ times the weighted pull to an optimizer's updates, and return the sum."""
        share = float(self.gamma) * self.graph.largest

        def both(move: jax.Array, pull: jax.Array, rest: jax.Array) -> jax.Array:
            return (move + share * (pull + rest)).astype(move.dtype)

        return jax.tree.map(both, moves, tree.pull, tree.rest)


def copied(state: PerWorker) -> tuple[Copied, ...]:
    """Return the copies and pulls of this worker's trees."""
    links: Links = drop_worker_axis(state).reset_rows
    return links.trees


def wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), tree)


def _moved(old: Copied, sent: PyTree, pull: PyTree, rest: PyTree) -> Copied:
    sums = jax.tree.map(_rounding.two_sum, old.pull, pull)
    total, lost = jax.tree.transpose(jax.tree.structure(old.pull), jax.tree.structure((0, 0)), sums)
    return Copied(
        copy=jax.tree.map(jnp.add, old.copy, sent),
        pull=total,
        rest=jax.tree.map(lambda r, dropped, more: r + (dropped + more), old.rest, lost, rest),
    )


class _Sums(NamedTuple):
    """For each part: the values that this worker sent, the pull, and the pull's rounding error."""

    said: Vectors
    pull: Vectors
    rest: Vectors


def _add(
    codec: Parts, buffers: jax.Array, step: Step, shares: jax.Array, equal: np.bool_
) -> tuple[jax.Array, _Sums]:
    """Decode the buffers of this worker and its neighbors, and sum the pulls.

    One loop decodes all buffers, because sender and receivers must decode a buffer to the same
    bits. The first result tells for each buffer if it is finite.
    """
    like = codec.payload_spec

    def add(sums: _Sums, row: Any) -> tuple[_Sums, jax.Array]:
        is_own, words, share = row
        payloads, finite, _ = _wire.unpack(words, like)
        vectors = _settled(codec.decompress(payloads, step), finite)
        said = optax.tree.where(is_own, vectors, sums.said)
        # Two neighbors compute this difference with opposite signs, so their terms sum to zero.
        draws = tuple(theirs - own for theirs, own in zip(vectors, said, strict=True))
        if not equal:
            draws = _settled(tuple(share * draw for draw in draws), share >= 0)
        both = [_rounding.two_sum(*pair) for pair in zip(sums.pull, draws, strict=True)]
        rest = tuple(r + lost for r, (_, lost) in zip(sums.rest, both, strict=True))
        return _Sums(said, tuple(total for total, _ in both), rest), finite

    zeros = tuple(_axes.vary_like(jnp.zeros(n.shape, n.dtype), buffers) for _, n in codec.pairs)
    rows = (jnp.arange(len(buffers)) == 0, buffers, shares)
    sums, finites = lax.scan(add, _Sums(zeros, zeros, zeros), rows)
    return finites, sums


def _settled(vectors: Vectors, keep: jax.Array) -> Vectors:
    """Return the vectors, rounded to float32, if `keep` is True; else zeros.

    The bit mask keeps XLA from fusing a multiply and an add. Fused, they could round differently on
    the neighbor.
    """
    mask = jnp.where(keep, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    bits = (lax.bitcast_convert_type(vector, jnp.uint32) for vector in vectors)
    return tuple(lax.bitcast_convert_type(b & mask, jnp.float32) for b in bits)


def _codec_of(codecs: Sequence[Codecs], buckets: Sequence[Bucket]) -> Parts:
    pairs = zip(codecs, buckets, strict=True)
    return Parts.of([pair for codec, b in pairs for pair in _parts.codec_of(codec, b).pairs])


def _vectors(buckets: Sequence[Bucket]) -> Vectors:
    return tuple(vector for bucket in buckets for vector in _parts.vectors(bucket))


def _rebuild(flat: Vectors, buckets: Sequence[Bucket]) -> list[Any]:
    """Split the vectors of all trees by tree, and rebuild the bucket of each tree."""
    left = iter(flat)
    return [_parts.rebuild([next(left) for _ in bucket], bucket) for bucket in buckets]


def _trees(buckets: list[list[Any]], joins: Sequence[Join]) -> tuple[Any, ...]:
    return tuple(join(_axes.whole([row[i] for row in buckets])) for i, join in enumerate(joins))
