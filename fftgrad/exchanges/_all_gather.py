"""A mean of payloads that cannot be summed as they are."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes, _wire
from fftgrad._base import AxisName, Codec, Like, Payload, Reduced, Rng, payload_spec, spec
from fftgrad._chain import accumulate, split_linear


class AllGatherState(NamedTuple):
    """State: how many values no codec could represent, over all workers and steps so far."""

    overflow: jax.Array


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
      codec: a codec, usually a chain such as `chain(Fft(), TopK(fraction=0.1), RangeFloat(8))`.

    Shapes: x float32[n] -> mean float32[n], sent float32[n].

    Wire: `wire_bytes(codec, x)`. A ring sends it w - 1 times, so the traffic grows with w.

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

    codec: Codec

    def init(self, like: Like) -> AllGatherState:
        return AllGatherState(jnp.zeros((), jnp.int32))

    def mean(self, x: jax.Array, state: AllGatherState, rng: Rng, axis_name: AxisName) -> Reduced:
        like = spec(x)
        linear, rest = split_linear(self.codec)
        coefficients = linear.compress(x, rng)
        coefficients_like = spec(coefficients.main)
        payload = rest.compress(coefficients.main, rng)

        overflow = jnp.asarray(coefficients.overflow + payload.overflow)
        header = _wire.Header(jnp.all(jnp.isfinite(x)), overflow)
        buffers = _axes.all_gather(_wire.pack(header, payload), axis_name)
        headers, mean = decode_mean(self.codec, buffers, like, rng)
        sent = rest.decompress(payload, coefficients_like, rng)
        sent = linear.decompress(Payload(sent), like, rng)
        seen = state.overflow + _axes.over_other_axes(lax.psum, headers.overflow.sum())
        return Reduced(mean, sent, AllGatherState(seen))

    def wire_bytes(self, like: Like) -> int:
        return _wire.nbytes(payload_spec(self.codec, like))


def decode_mean(
    codec: Codec, buffers: jax.Array, like: Like, rng: Rng
) -> tuple[_wire.Header, jax.Array]:
    """The headers of buffers uint32[w, s], stacked, and the mean of what the buffers stand for."""
    linear, rest = split_linear(codec)
    coefficients_like = payload_spec(linear, like).main
    payload_like = payload_spec(rest, coefficients_like)
    workers = buffers.shape[0]
    headers, _ = jax.vmap(lambda words: _wire.unpack(words, payload_like))(buffers)

    def add(worker: jax.Array, total: jax.Array) -> jax.Array:
        _, payload = _wire.unpack(buffers[worker], payload_like)
        return accumulate(rest, total, payload, 1.0 / workers, rng)

    start = jnp.where(jnp.all(headers.finite), 0.0, jnp.nan).astype(coefficients_like.dtype)
    start = jnp.broadcast_to(start, coefficients_like.shape)
    total = lax.fori_loop(0, workers, add, start)
    return headers, linear.decompress(Payload(total), like, rng)
