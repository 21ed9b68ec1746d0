"""One bit a value, at a scale that all know from the number of the step."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops.packing import _bitmap


@dataclasses.dataclass(frozen=True)
class DynamicSign(Quantizer):
    """Quantizer: the sign of each value, at a scale that shrinks from step to step by itself.

    With s_t = scale · decay^t in step t, which sender and receivers count alike,

        C(x)_i = s_t / 2 where x_i >= 0, else -s_t / 2.

    It is made for differences to what the receiver has already, as `choco_sgd` and `beer` send
    them: where the largest is at most s_t, what is left is at most s_t / 2, so a scale that shrinks
    more slowly than the method converges keeps up with it. It knows nothing of x but its signs:
    where all of x is smaller than s_t / 4 it adds error, and where a value is larger than s_t it
    falls behind. In the end the scale is too small for float32, after 5,500 steps at 0.98: make the
    state anew before that, with a scale of that time.

    Args:
      scale: s_0, at least the largest value of the first step.
      decay: 0 < decay <= 1, and above 1/2, or no step can follow.

    Shapes: x float32[n] -> main uint32[ceil(n/32)], side ().

    Wire: 4 ceil(n/32) bytes: 1 bit a value, and no scale.

    Claims: |x_i| <= s_t for all i implies |x_i - C(x)_i| <= s_t / 2; biased; not summable. Zero
      does not come back as zero, and a NaN comes back as a number; the exchange's header carries
      the finite flag. Values beyond s_t, NaN among them, are counted in `overflow`.

    Differs from the paper: the quantizer, and that its step is scaled in time, are Dyna-COLD's; how
      the paper chooses the scale was not at hand.

    Raises:
      ValueError: if `scale` is not positive, or `decay` is outside (1/2, 1]; while tracing, if the
        input is not a float32 vector.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> x, codec = jnp.array([0.9, -0.3, 0.1]), fg.codecs.DynamicSign(scale=1.0, decay=0.75)
      >>> step = fg.Step(number=2)
      >>> fg.decompress(codec, fg.compress(codec, x, step=step), like=x, step=step)
      Array([ 0.28125, -0.28125,  0.28125], dtype=float32)

    References:
      Zhang et al., "Innovation Compression for Communication-efficient Distributed Optimization
      with Linear Convergence", IEEE TAC 2023, arXiv:2105.06697 (Dyna-COLD).
    """

    scale: float
    decay: float

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(
                f"DynamicSign(scale): must be positive, got {self.scale}; use the largest value of "
                "the first step."
            )
        if not 0.5 < self.decay <= 1:
            raise ValueError(
                f"DynamicSign(decay): must be above 1/2 and at most 1, got {self.decay}; use 0.98."
            )

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
