"""One bit a value."""

import math

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _finite
from fftgrad.ops.packing import _bitmap


@value
class Sign(Quantizer):
    """Quantizer: the sign of each value, in one bit, and the mean magnitude of all.

    C(x) = (||x||₁ / n) sign(x), with sign(0) = 1: one bit cannot say zero.

    Shapes: x float32[n] -> main uint32[ceil(n/32)], side float32[1].

    Wire: 4 ceil(n/32) + 4 bytes: 1 bit a value, really.

    Claims: biased; not summable; ||x - C(x)||² = (1 - ||x||₁² / (n ||x||²)) ||x||². A payload with
      a NaN or an infinity decodes to NaN or infinities throughout.

    Raises:
      ValueError: while tracing, if the input is not a float32 vector.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> x = jnp.array([3.0, -1.0, 0.5, -1.5])
      >>> fg.decompress(fg.Sign(), fg.compress(fg.Sign(), x), like=x)
      Array([ 1.5, -1.5,  1.5, -1.5], dtype=float32)

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv:1901.09847. Seide et
      al., Interspeech 2014.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("Sign", x)
        (words,) = _bitmap.pack(x < 0)
        return Compressed(Payload(words, _finite.mean(jnp.abs(x), x.size)[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        negative = _bitmap.unpack(payload.main, math.prod(like.shape))
        return jnp.where(negative, -payload.side, payload.side)
