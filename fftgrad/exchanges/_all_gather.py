"""A mean of payloads that cannot be summed as they are."""

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
    Payload,
    PyTree,
    Reduced,
    Rng,
    payload_spec,
    spec,
)
from fftgrad._chain import accumulate, adapt, init, split_for_sum
from fftgrad._parts import unzip
from fftgrad._state import PerWorker, add_worker_axis, drop_worker_axis

FEW, LARGE = 8, 1 << 16
"""Up to how many workers, and from how many values on, payloads are decoded without a loop."""


class AllGatherState(NamedTuple):
    """State of `AllGather`.

    Attributes:
      overflow: how many values no codec could represent, over all workers and steps so far.
      codecs: what the codec of each part remembers, of which each worker has its own.
    """

    overflow: jax.Array
    codecs: PerWorker


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Exchange: every worker sends its payload to all, and all decode and average all of them.

    Each payload travels as one uint32 buffer in one collective. The codec's summable prefix (a
    linear transform) is undone once, after the sum: w payloads cost one inverse FFT. Payloads are
    added in the order of the workers, so that all replicas get the same bits.

    With 4 workers that send the buffers b_0 ... b_3, each of words uint32[s], every worker
    receives uint32[4, s] = [b_0, b_1, b_2, b_3].

    If anything that any worker had to send is not finite, the mean is NaN throughout, on all
    workers: the headers of the buffers tell, without a further collective.

    Args:
      codec: a codec, usually a chain such as `chain(Fft(), TopK(fraction=0.1), RangeFloat(8))`;
        or a rule, a function from the name and the shape of a part to its codec.

    Shapes: x float32[...], or a dict of such -> mean, sent of the same shapes.

    Wire: 8 bytes + main and side of every part, `fg.wire_bytes(exchange, x)`. A ring sends it
      w - 1 times, so the traffic grows with w.

    Claims: unbiased if the codec is; all workers get the same bits.

    Raises:
      ValueError: while tracing, if the codec does not fit the shape.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> exchange = fg.AllGather(fg.TopK(k=1))
      >>> x = jnp.array([[4.0, 1.0], [1.0, 2.0]])
      >>> rng = fg.Rng.of(0)
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), rng, "data").mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2., 1.], dtype=float32)
    """

    codec: Codec | CodecRule

    def init(self, like: PyTree) -> AllGatherState:
        likes = _parts.vector_likes(like)
        states = [
            init(codec, part)
            for codec, part in zip(_parts.codecs(self.codec, like), likes, strict=True)
        ]
        return AllGatherState(jnp.zeros((), jnp.int32), add_worker_axis(states))

    def mean(self, x: PyTree, state: AllGatherState, rng: Rng, axis_name: AxisName) -> Reduced:
        codecs = _parts.codecs(self.codec, x)
        vectors = _parts.vectors(x)
        likes = [spec(vector) for vector in vectors]
        rngs = _parts.rngs(rng, len(codecs))
        own = drop_worker_axis(state.codecs)
        payloads, adapted = unzip(
            adapt(codec, vector, before, r)
            for codec, vector, before, r in zip(codecs, vectors, own, rngs, strict=True)
        )

        overflow = sum(payload.overflow for payload in payloads)
        header = _wire.Header(_parts.all_finite(vectors), overflow)
        buffers = _axes.all_gather(_wire.pack(header, *payloads), axis_name)
        headers, means = decode_mean(codecs, buffers, likes, rngs)
        sent = [
            codec.decompress(payload, like, r)
            for codec, payload, like, r in zip(codecs, payloads, likes, rngs, strict=True)
        ]
        adapted = _parts.where(_axes.everywhere(jnp.all(headers.finite)), adapted, own)
        seen = state.overflow + _axes.over_other_axes(lax.psum, jnp.sum(headers.overflow))
        return Reduced(
            mean=_parts.rebuild(means, x),
            sent=_parts.rebuild(sent, x),
            state=AllGatherState(seen, add_worker_axis(adapted)),
        )

    def wire_bytes(self, like: PyTree) -> int:
        codecs = _parts.codecs(self.codec, like)
        return _wire.nbytes(*map(payload_spec, codecs, _parts.vector_likes(like)))


def decode_mean(
    codecs: Sequence[Codec], buffers: jax.Array, likes: Sequence[Like], rngs: Sequence[Rng]
) -> tuple[_wire.Header, list[jax.Array]]:
    """The headers of buffers uint32[w, s], stacked, and the means of what the buffers stand for.

    Summed after the codecs' summable prefix, so that w payloads cost one inverse transform.
    """
    linears, rests = unzip(map(split_for_sum, codecs, likes))
    coefficients = [p.main for p in map(payload_spec, linears, likes)]
    payloads_like = list(map(payload_spec, rests, coefficients))
    workers = buffers.shape[0]
    headers = jax.vmap(lambda words: _wire.unpack(words)[0])(buffers)

    def add(worker: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        _, payloads = _wire.unpack(buffers[worker], *payloads_like)
        return [
            accumulate(rest, total, payload, 1.0 / workers, r)
            for rest, total, payload, r in zip(rests, totals, payloads, rngs, strict=True)
        ]

    # A pass over a row that is chosen while running is not vectorized, and sums of known rows are
    # one pass; but each takes its time to compile.
    unroll = workers <= FEW and max((c.size for c in coefficients), default=0) >= LARGE
    start = jnp.where(jnp.all(headers.finite), 0.0, jnp.nan)
    starts = [jnp.broadcast_to(start.astype(c.dtype), c.shape) for c in coefficients]
    totals = lax.fori_loop(0, workers, add, starts, unroll=unroll)
    means = [
        linear.decompress(Payload(total), like, r)
        for linear, total, like, r in zip(linears, totals, likes, rngs, strict=True)
    ]
    return headers, means
