"""A mean by two stages: shards to their owners, then mean shards to all workers."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import Averaged, Comm, PyTree, State, Stats
from fftgrad._values import check_count, value
from fftgrad.exchanges import _parts, _shards
from fftgrad.exchanges._parts import CompressedParts, OfCodec, Parts, Vectors
from fftgrad.exchanges._shards import Reset
from fftgrad.ops import _wire


@value
class TwoStage(OfCodec):
    """Exchange: a compressed reduce-scatter, then a compressed all-gather.

    Each part is cut into w shards, and each worker owns one shard. In the first stage, every worker
    compresses each shard and sends it to its owner (an all-to-all). In the second stage, the owner
    averages the received shards and its own shard, which it takes uncompressed. It compresses the
    mean and sends it to all workers (an all-gather).

    `Averaged.error` holds the errors of both stages, and becomes the residual. Only the owner of a
    shard knows the error of the second stage. It keeps w times this error, because the next mean
    divides its residual by w.

    The traffic of a link does not grow with w. The second stage compresses a mean, which has less
    noise than a gradient. For payloads of a few kilobytes, latency dominates, and one all-gather is
    faster than two collectives.

    Args:
      codec: a codec, or a rule that returns a codec for the name of a part and the shape of one of
        its shards: a part of n values has shards of n/w values. If a codec keeps k coefficients of
        a part, it keeps k/w coefficients of each shard. Each shard has its own codec state, which
        is reset if the number of workers changes.
      workers: w, the number of workers along the axis.

    Wire: w buffers to the owners, then one buffer to all workers. Each buffer has a header of 4
      bytes and the payload of n/w values. So, for any w, each stage sends about the payload of n
      values over a link.

    Claims: with `ErrorFeedback` nothing is lost: the sum of all steps' means, plus the mean of the
      workers' residuals, equals the sum of the mean gradients, as with `AllGather`.

    Example:
      >>> exchange = fg.TwoStage(fg.Sign(), workers=2)
      >>> x = jnp.array([[2.0, 1.0], [2.0, -1.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2., 0.], dtype=float32)

    Differs from the paper: one residual holds the errors of both stages, so
      `fg.checkpoint.reshard_state` preserves both errors for another number of workers. An owner
      does not compress its own shard in the first stage.

    References:
      Tang et al., ICML 2021, arXiv:2102.02888.
    """

    workers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("TwoStage(workers)", self.workers, "use that of the axis.")

    def init(self, like: PyTree) -> State:
        learned = self._codec(like).init()
        rows = jax.tree.map(lambda a: jnp.broadcast_to(a, (self.workers, *jnp.shape(a))), learned)
        return State(own=Reset((rows, learned)))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        _axes.check_workers("TwoStage", self.workers, comm.axis_name)
        codec = self._codec(x)
        before, at_owner = state.own.reset_rows
        own = comm.index
        again = dataclasses.replace(comm, step=comm.step.fold_local(self.workers))

        rows = tuple(_shards.to_shards(x, self.workers))
        first = to_owners(codec, rows, before, comm)
        # No link carries the owner's own shard, so it is not compressed.
        means = tuple(
            mean + error[own] / self.workers
            for mean, error in zip(first.vectors, first.errors, strict=True)
        )
        second = to_all(codec, means, at_owner, again, first.stats)
        # The owner keeps w times its error, as the next mean divides by w. Overflow is dropped.
        zeroed = functools.partial(jnp.nan_to_num, posinf=0.0, neginf=0.0)
        errors = [
            error.at[own].set(zeroed(error[own] + self.workers * (mean - every[own])))
            for error, mean, every in zip(first.errors, first.vectors, second.vectors, strict=True)
        ]
        return Averaged(
            mean=_shards.from_shards(second.vectors, x),
            error=_shards.from_shards(errors, x),
            state=State(own=Reset((first.state, second.state))),
            stats=second.stats,
        )

    def wire_bytes(self, like: PyTree) -> int:
        return (self.workers + 1) * _wire.nbytes(self._codec(like).payload_spec)

    def _codec(self, like: PyTree) -> Parts:
        shards = _shards.shard_likes(like, self.workers)
        return _parts.codec_of(self.codec, shards).shard(self.workers)


class Half(NamedTuple):
    vectors: Vectors  # the mean of this worker's shard; second stage: all shards, [w, size]
    errors: Vectors  # this worker's rows minus what their owners decode; () in the second stage
    state: PyTree
    stats: Stats


def to_owners(codec: Parts, rows: Vectors, state: PyTree, comm: Comm) -> Half:
    """Compress row i of each part [w, size] for worker i, which averages the received rows."""

    def one(number: jax.Array, shards: Vectors, state: PyTree) -> tuple[CompressedParts, Vectors]:
        out = codec.compress(shards, state, comm.step.fold_local(number))
        return out, codec.error(shards, out, comm.step)

    out, errors = codec.side_by_side(one)(jnp.arange(comm.workers), rows, state)
    got, stats = comm.scatter(out.payloads, of=rows, overflow=out.overflow)
    means = codec.mean(got, stats.poison, comm.step, shards=True)
    return Half(means, errors, out.state, stats)


def to_all(
    codec: Parts, shards: Vectors, state: PyTree, comm: Comm, received: Stats = Stats()
) -> Half:
    """Compress a shard of each part, and gather the shards of all owners.

    All shards are NaN if any value is not finite. The headers include the stats of the first stage.
    """
    step = comm.step
    out = codec.compress(shards, state, step)
    got, stats = comm.gather(out.payloads, of=shards, overflow=out.overflow, received=received)
    every = codec.side_by_side(lambda payloads: codec.decompress(payloads, step))(got)
    rows = tuple(vectors + stats.poison for vectors in every)
    return Half(rows, (), out.state, stats)
