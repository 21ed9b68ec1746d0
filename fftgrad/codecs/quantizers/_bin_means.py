"""Few bins around the mean, each decoded as the mean of what is in it."""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_count, value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _platform
from fftgrad.ops.packing import _codes

SPAN = 6.0
"""Standard deviations that the bins cover together."""


@value
class BinMeans(Quantizer):
    """Quantizer: 2^bits bins of equal width around the mean; a value becomes the mean of its bin.

    With m the mean of the vector, σ its standard deviation and B = 2^bits, a value v has the code

        q = clip(round((v - m) / (6σ / B) + B/2), 0, B - 1),

    and is decoded as the mean of all values with that code. With one bit the codes are 0 up to the
    mean and 1 above it. Meant for what a selector of the largest leaves: two heaps of values of
    either sign, with few between.

    Args:
      bits: width of a code, 1 <= bits <= 4; 2 is SparseLoCo's.

    Wire: x float32[n] -> main uint32[ceil(n · bits / 32)], side float32[2^bits].

    Claims: biased, though the sum of all values is kept; not summable. A payload with a NaN or an
      infinity decodes to NaN.

    Differs from the paper: σ divides by n where its code divides by n - 1, which for one value is
      not a number; one bit parts at the mean, where its formula would leave one bin nearly all.

    Example:
      >>> x, codec = jnp.array([-5.0, -4.0, 4.0, 5.0]), fg.codecs.BinMeans(bits=2)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([-4.5, -4.5,  4.5,  4.5], dtype=float32)

    References:
      Sarfi et al., 2025, arXiv:2508.15706; 2026, arXiv:2603.08163.
    """

    bits: int = 2

    def __post_init__(self) -> None:
        check_count("BinMeans(bits)", self.bits, "for more bits use LogLevels.", 1, 4)

    @property
    def _middle(self) -> float:
        return 2**self.bits / 2 if self.bits > 1 else 0.5

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("BinMeans", x)
        top, _ = _scale.norms(x[None])
        y = _scale.in_units(x, top[0], 1.0)  # so that no square overflows
        codes = _platform.dependent(y, cpu=self._codes_in_a_loop, default=self._codes_kept)
        means = jnp.stack([_mean_where(codes == code, y) for code in range(2**self.bits)])
        side = means * _scale.divisor(top[0])
        return Compressed(Payload(_codes.pack(codes, self.bits), side))

    def _codes(self, y: jax.Array) -> jax.Array:
        bins = 2**self.bits
        centred = y - jnp.sum(y) / y.size
        width = SPAN / bins * jnp.sqrt(jnp.sum(jnp.square(centred)) / y.size)
        places = jnp.round(centred / _scale.divisor(width) + self._middle)
        return jnp.clip(places, 0, bins - 1).astype(jnp.uint32)

    # XLA finds what is cheap again for each of its readers, and may round it otherwise there: a
    # value would be sent by one code, and be in the mean of another.

    def _codes_kept(self, y: jax.Array) -> jax.Array:
        return lax.optimization_barrier(self._codes(y))

    def _codes_in_a_loop(self, y: jax.Array) -> jax.Array:
        # XLA for CPUs drops barriers too early, but keeps what a loop returns. There is one turn,
        # and two for a NaN: were the number known, there would be no loop.
        start = jnp.isfinite(y[0]).astype(jnp.int32), jnp.zeros_like(y, jnp.uint32)
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, self._codes(y)), start)[1]

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, like.shape[0])
        means = jnp.where(jnp.all(jnp.isfinite(payload.side)), payload.side, jnp.nan)
        out = jnp.broadcast_to(means[0], like.shape)
        for code in range(1, 2**self.bits):  # a choice among few is vectorized, a gather is not
            out = jnp.where(codes == code, means[code], out)
        return out


def _mean_where(condition: jax.Array, y: jax.Array) -> jax.Array:
    count = jnp.sum(condition.astype(jnp.float32))
    return jnp.sum(jnp.where(condition, y, 0.0)) / jnp.maximum(count, 1.0)
