"""Signs, and one magnitude for all."""

import math

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_within, value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _finite
from fftgrad.ops.packing import _bitmap


@value
class Sign(Quantizer):
    """Quantizer: the sign of each value, in one bit, and the mean magnitude of all.

    C(x) = (||x||₁ / n) sign(x), with sign(0) = 1: one bit cannot say zero.

    Wire: x float32[n] -> main uint32[ceil(n/32)], side float32[1].

    Claims: biased; not summable; ||x - C(x)||² = (1 - ||x||₁² / (n ||x||²)) ||x||². A payload with
      a NaN or an infinity decodes to NaN or infinities throughout.

    Example:
      >>> x = jnp.array([3.0, -1.0, 0.5, -1.5])
      >>> fg.decompress(fg.Sign(), fg.compress(fg.Sign(), x), like=x)
      Array([ 1.5, -1.5,  1.5, -1.5], dtype=float32)

    References:
      Karimireddy et al., ICML 2019, arXiv:1901.09847. Seide et al., Interspeech 2014.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("Sign", x)
        (words,) = _bitmap.pack(x < 0)
        return Compressed(Payload(words, _finite.mean(jnp.abs(x), x.size)[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        negative = _bitmap.unpack(payload.main, math.prod(like.shape))
        return jnp.where(negative, -payload.side, payload.side)


@value
class DynamicSign(Quantizer):
    """Quantizer: the sign of each value, at a scale that shrinks from step to step by itself.

    With s_t = scale · decay^t in step t, which sender and receivers count alike,

        C(x)_i = s_t / 2 where x_i >= 0, else -s_t / 2.

    For differences to what the receiver has, as `choco_sgd` and `beer` send them: where the largest
    is at most s_t, at most s_t / 2 is left, so the scale has to shrink more slowly than the method
    converges. Where all of x is smaller than s_t / 4 it adds error; a value larger than s_t falls
    behind. After 5,500 steps at 0.98 the scale is too small for float32: make the state anew before
    that, with a scale of that time.

    Args:
      scale: s_0, at least the largest value of the first step.
      decay: 0 < decay <= 1, and above 1/2, or no step can follow.

    Wire: x float32[n] -> main uint32[ceil(n/32)]; no scale.

    Claims: |x_i| <= s_t for all i implies |x_i - C(x)_i| <= s_t / 2; biased; not summable. Zero
      does not come back as zero, and a NaN comes back as a number; the exchange's header carries
      the finite flag. Values beyond s_t, NaN among them, are counted in `overflow`.

    Differs from the paper: the quantizer, and that its step is scaled in time, are Dyna-COLD's; how
      the paper chooses the scale was not at hand.

    Example:
      >>> x, codec = jnp.array([0.9, -0.3, 0.1]), fg.codecs.DynamicSign(scale=1.0, decay=0.75)
      >>> step = fg.Step(number=2)
      >>> fg.decompress(codec, fg.compress(codec, x, step=step), like=x, step=step)
      Array([ 0.28125, -0.28125,  0.28125], dtype=float32)

    References:
      Zhang et al., IEEE TAC 2023, arXiv:2105.06697 (Dyna-COLD).
    """

    scale: float
    decay: float

    def __post_init__(self) -> None:
        remedy = "use the largest value of the first step."
        check_within("DynamicSign(scale)", self.scale, "(0, inf)", remedy)
        check_within("DynamicSign(decay)", self.decay, "(0.5, 1]", "use 0.98.")

    def _now(self, step: Step) -> jax.Array:
        number = jnp.asarray(step.number, jnp.float32)
        return jnp.float32(self.scale) * jnp.exp2(number * jnp.float32(math.log2(self.decay)))

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("DynamicSign", x)
        beyond = ~(jnp.abs(x) <= self._now(step))
        (words,) = _bitmap.pack(x < 0)
        return Compressed(Payload(words), jnp.sum(beyond, dtype=jnp.int32))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        half = self._now(step) / 2
        negative = _bitmap.unpack(payload.main, math.prod(like.shape))
        return jnp.where(negative, -half, half).astype(like.dtype)


@value
class MeanMagnitude(Quantizer):
    """Quantizer: the mean of the values that are not zero, for each of them.

    Meant for values of one sign, as `AlternatingSign` and `Threshold` leave them. All values become
    the mean, zeros among them too, so it goes behind a selector that keeps none.

    Wire: x float32[k] -> main float32[1].

    Claims: biased; not summable.

    Example:
      >>> fg.compress(fg.codecs.MeanMagnitude(), jnp.array([1.0, 3.0, 0.0])).main
      Array([2.], dtype=float32)

    References:
      Fang et al., JPDC 133, 2019, arXiv:1808.04357.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("MeanMagnitude", x)
        count = jnp.maximum(jnp.sum((x != 0).astype(jnp.float32)), 1.0)
        return Compressed(Payload(_finite.mean(x, count)[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return jnp.broadcast_to(payload.main, like.shape)
