"""Three values, five to a byte."""

import math

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_within, value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _finite
from fftgrad.ops.packing import _digits


@value
class Ternary(Quantizer):
    """Quantizer: -s, 0 or s for each value, by chance.

    With σ the root mean square of the vector, |x_i| is clipped at clip · σ, s is the largest
    magnitude that is left, and C(x)_i = s sign(x_i) with probability |x_i| / s, else 0.

    Args:
      clip: in units of σ; the paper's networks use 2.5. None leaves the values as they are, and
        one large value then makes all others zero most of the time.

    Wire: x float32[n] -> main uint32[ceil(n/20)], side float32[1]: 1.6 bits a value; the paper
      takes 2.

    Claims: unbiased if it does not clip; not summable (`IntegerSum` shares the scale and sums). A
      payload with a NaN or an infinity decodes to NaN.

    Differs from the paper: σ is the deviation from zero, where its code takes that from the mean,
      which is nothing where all values are about equal; when clipping, its code takes s = clip · σ
      even where no value is as large.

    Example:
      >>> x, step = jnp.array([0.0, 2.0, -2.0]), fg.Step.of(0)
      >>> fg.decompress(fg.Ternary(), fg.compress(fg.Ternary(), x, step=step), like=x)
      Array([ 0.,  2., -2.], dtype=float32)

    References:
      Wen et al., NeurIPS 2017, arXiv:1705.07878.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        check_clip("Ternary", self.clip)

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("Ternary", x)
        x, scale = clipped(x, self.clip)
        digits = _scale.to_levels(x, scale, 1, _scale.noise(self, step, x.size)) + 1
        return Compressed(Payload(_digits.pack(digits.astype(jnp.uint32), 3), scale[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        digits = _digits.unpack(payload.main, 3, math.prod(like.shape))
        scale = jnp.where(jnp.isfinite(payload.side), payload.side, jnp.nan)
        return (digits.astype(jnp.float32) - 1) * scale


def check_clip(owner: str, clip: float | None) -> None:
    """Refuses a bound that is not positive."""
    if clip is not None:
        check_within(f"{owner}(clip)", clip, "(0, inf]", "use clip=2.5, or None for no bound.")


def clipped(x: jax.Array, clip: float | None) -> tuple[jax.Array, jax.Array]:
    """`x` within `clip` times its root mean square, and the largest magnitude left, float32[].

    The magnitude is NaN if anything is not finite.
    """
    top = _finite.largest(x)
    if clip is None:
        return x, top
    scaled = _scale.in_units(x, top, 1.0)  # so that no square overflows
    bound = jnp.minimum(clip * jnp.sqrt(jnp.mean(jnp.square(scaled))) * top, top)
    # Written so that a NaN stays one; what is too small to square is not clipped.
    bound = jnp.where(bound == 0, top, bound)
    return jnp.clip(x, -bound, bound), bound
