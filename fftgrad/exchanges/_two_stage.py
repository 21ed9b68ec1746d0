"""A mean whose bytes do not grow with the workers: shards to their owners, and back to all."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes, _parts, _wire
from fftgrad._base import (
    AxisName,
    Codec,
    CodecRule,
    Like,
    Memory,
    PyTree,
    Reduced,
    Rng,
    constructor_call,
    payload_spec,
    spec,
)
from fftgrad._chain import shard
from fftgrad._state import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.exchanges._all_gather import decode_mean
from fftgrad.memories._error_feedback import ErrorFeedback


class TwoStageState(NamedTuple):
    """State of `TwoStage`.

    Attributes:
      overflow: how many values no codec could represent, over all workers, stages and steps.
      server: the server memory's state, of which each worker has that of its shard.
    """

    overflow: jax.Array
    server: PerWorker


@dataclasses.dataclass(frozen=True, repr=False)
class TwoStage:
    """Exchange: compressed shards to the worker that owns them, and their compressed mean to all.

    Each part is padded and cut into w shards, one for each worker. Every worker compresses each
    of its shards and sends it to its owner (an all-to-all); the owner decodes and averages what it
    got, adds what its own memory kept of earlier means, compresses the mean again, and sends it to
    all (an all-gather). Both losses are thus fed back: the worker's by the memory of
    `compressed_pmean`, the owner's by `server_memory`.

    Args:
      codec: a codec, or a rule from a part's name and the shape of its shard to one. A number of
        coefficients to keep, such as TopK's k, is that of the whole part, and the shards have equal
        shares of it. What an adaptive codec remembers is not kept: it acts as in its first step.
      workers: w, the number of workers: the size of the shards, and of the state, follows from it.
      server_memory: what the owner of a shard does with what the second compression loses.

    Shapes: x float32[...], or a dict of such -> mean, sent of the same shapes.

    Wire: w + 1 buffers, each of 8 bytes and the payload of n/w values: about the payload of n
      values in each stage, whatever w.

    Claims: all workers get the same bits; if anything is not finite anywhere the mean is NaN
      throughout, and the server memory stays as it was.

    Raises:
      ValueError: while tracing, if the axis has not `workers` workers.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> exchange = fg.TwoStage(fg.Sign(), workers=2)
      >>> x = jnp.array([[2.0, 1.0], [2.0, -1.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.Rng.of(0), "data").mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2., 0.], dtype=float32)

    References:
      Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888.
    """

    codec: Codec | CodecRule
    workers: int
    server_memory: Memory = ErrorFeedback()

    __repr__ = constructor_call

    def init(self, like: PyTree) -> TwoStageState:
        memory = self.server_memory.init(self._shard_likes(like))
        return TwoStageState(jnp.zeros((), jnp.int32), add_worker_axis(memory))

    def mean(self, x: PyTree, state: TwoStageState, rng: Rng, axis_name: AxisName) -> Reduced:
        _axes.check_workers("TwoStage", self.workers, axis_name)
        codecs, likes = self._codecs(x), self._shard_likes(x)
        rngs = _parts.rngs(rng, len(codecs))
        shards = [_parts.to_shards(part, self.workers) for part in jax.tree.leaves(x)]

        def row(number: jax.Array, *rows: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            return _compress(codecs, rows, _draw(rngs, number))

        buffers, sent = jax.vmap(row)(jnp.arange(self.workers), *shards)
        received = _axes.all_to_all(buffers, axis_name)
        headers, means = decode_mean(codecs, received, likes, rngs)

        own = drop_worker_axis(state.server)
        y, compensated = self.server_memory.compensate(means, own)
        again, kept = _compress(codecs, y, _draw(rngs, self.workers), jnp.sum(headers.overflow))
        gathered = _axes.all_gather(again, axis_name)
        _, remembered = self.server_memory.update(y, kept, y, compensated)
        headers, means = _decode_shards(codecs, gathered, likes, rngs)

        finite = _axes.everywhere(jnp.all(headers.finite))
        seen = _axes.over_other_axes(lax.psum, jnp.sum(headers.overflow))
        return Reduced(
            mean=_parts.from_shards(means, x),
            sent=_parts.from_shards(sent, x),
            state=TwoStageState(
                state.overflow + seen,
                _parts.where(finite, add_worker_axis(remembered), state.server),
            ),
        )

    def wire_bytes(self, like: PyTree) -> int:
        payloads = map(payload_spec, self._codecs(like), self._shard_likes(like))
        return (self.workers + 1) * _wire.nbytes(*payloads)

    def _codecs(self, like: PyTree) -> list[Codec]:
        codecs = _parts.codecs(self.codec, _parts.shard_likes(like, self.workers))
        return [shard(codec, self.workers) for codec in codecs]

    def _shard_likes(self, like: PyTree) -> list[Like]:
        return jax.tree.leaves(_parts.shard_likes(like, self.workers))


def _draw(rngs: Sequence[Rng], number: jax.Array | int) -> list[Rng]:
    """Other local randomness for each shard."""
    return [Rng(r.shared, jax.random.fold_in(r.local, number)) for r in rngs]


def _compress(
    codecs: Sequence[Codec],
    shards: Sequence[jax.Array],
    rngs: Sequence[Rng],
    overflow: jax.Array | int = 0,
) -> tuple[jax.Array, list[jax.Array]]:
    """The buffer of a shard of each part, and what they decode to.

    Its header counts `overflow` besides its own.
    """
    payloads = [c.compress(x, r) for c, x, r in zip(codecs, shards, rngs, strict=True)]
    total = overflow + sum(payload.overflow for payload in payloads)
    buffer = _wire.pack(_wire.Header(_parts.all_finite(shards), total), *payloads)
    sent = [
        codec.decompress(payload, spec(x), r)
        for codec, payload, x, r in zip(codecs, payloads, shards, rngs, strict=True)
    ]
    return buffer, sent


def _decode_shards(
    codecs: Sequence[Codec], buffers: jax.Array, likes: Sequence[Like], rngs: Sequence[Rng]
) -> tuple[_wire.Header, list[jax.Array]]:
    """The headers, and what the buffers stand for, stacked; NaN unless all are finite."""
    specs = list(map(payload_spec, codecs, likes))

    def row(words: jax.Array) -> tuple[_wire.Header, list[jax.Array]]:
        header, payloads = _wire.unpack(words, *specs)
        return header, [
            codec.decompress(payload, like, r)
            for codec, payload, like, r in zip(codecs, payloads, likes, rngs, strict=True)
        ]

    headers, shards = jax.vmap(row)(buffers)
    poison = jnp.where(jnp.all(headers.finite), 0.0, jnp.nan)
    return headers, [rows + poison for rows in shards]
