"""Quantizers with at most one scale per bucket: casts, signs, ternary and uniform levels."""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check, check_choice, check_count, check_type, check_within, value
from fftgrad.ops import _codes, _finite, _random, _shapes
from fftgrad.ops._rounding import saturating_cast

TINY = np.float32(np.finfo(np.float32).tiny)


def check_real(owner: str, x: jax.Array) -> None:
    """Require a float32 vector; `Fft` returns a complex vector."""
    found, fine = f"{x.dtype}{list(x.shape)}", x.ndim == 1 and x.dtype == jnp.float32
    remedy = "after Fft use RangeFloat, and put other transforms first in the chain."
    check(fine, f"{owner}.compress(x)", "be a float32 vector", found, remedy)


def as_real(x: jax.Array) -> jax.Array:
    """Convert a vector to float32. For a complex vector, concatenate real and imaginary parts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([x.real, x.imag])
    return x.astype(jnp.float32)


def real_size(like: Like) -> int:
    return math.prod(like.shape) * (1 + jnp.issubdtype(like.dtype, jnp.complexfloating))


def from_real(values: jax.Array, like: Like) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return lax.complex(*jnp.split(values, 2))
    return values.astype(like.dtype)


def divisor(scale: jax.Array) -> jax.Array:
    """Replace a scale that is zero, or too small for a finite inverse, by 1."""
    return jnp.where(scale < TINY, 1.0, scale)


def in_units(x: jax.Array, scale: jax.Array, per_scale: float) -> jax.Array:
    """Return x · per_scale / scale, even if 1 / scale is subnormal and would be flushed to zero."""
    down = jnp.where(scale > 1.0, np.float32(1 / 16), np.float32(1.0))
    # Without the barrier, XLA recomputes the factors, with a division, for each value.
    down, factor = lax.optimization_barrier((down, per_scale / (divisor(scale) * down)))
    return (x * down) * factor


def row_norms(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude and the L2 norm of each row; NaN if a value is not finite."""
    top = _finite.largest(rows, axis=1)
    scaled = in_units(rows, top[:, None], 1.0)  # prevents overflow of squares
    return top, divisor(top) * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=1))


def uniform_noise(owner: object, step: Step, count: int) -> jax.Array:
    """Draw uniform float32[count] in [0, 1), different on each worker."""
    bits = _random.drawn_bits(owner, step.local, count, ", with another key for each call")
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def to_levels(x: jax.Array, scale: jax.Array, levels: int, uniform: jax.Array) -> jax.Array:
    """Round x, |x| <= scale, stochastically to integers in units of scale / levels."""
    share = in_units(x, scale, levels)
    down = jnp.floor(share)
    # Rounding may push the largest value slightly beyond the scale.
    return jnp.clip(down + (uniform < share - down).astype(jnp.float32), -levels, levels)


DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@value
class Cast(Quantizer):
    """Quantizer: round each value to a narrower floating-point dtype.

    Args:
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2; by name or as a dtype.

    Wire: x float32[n] -> main dtype[n]. It is sent as uint32, so that no collective widens it.

    Claims: biased; not summable. Relative error of a normal value at most 2^-8 for bfloat16, 2^-11
      for float16. Finite values out of range saturate and count as overflow; NaN stays NaN.

    Example:
      >>> fg.compress(fg.Cast("bfloat16"), jnp.array([1.0, 1.001])).main
      Array([1, 1], dtype=bfloat16)
    """

    dtype: Any

    def __post_init__(self) -> None:
        try:
            name = np.dtype(self.dtype).name
        except TypeError:  # an unknown name, such as "bf16"
            name = ""
        rule = f"be one of {', '.join(DTYPES)}"
        check_type(name in DTYPES, "Cast(dtype)", rule, self.dtype, "use bfloat16.")
        object.__setattr__(self, "dtype", name)  # a name prints and hashes

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("Cast", x)
        main, overflow = saturating_cast(x, self.dtype)
        return Compressed(Payload(main), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return payload.main.astype(like.dtype)


@value
class Sign(Quantizer):
    """Quantizer: the sign of each value in one bit, and the mean magnitude of all values.

    C(x) = (||x||₁ / n) sign(x), with sign(0) = 1.

    Wire: x float32[n] -> main uint32[ceil(n/32)], side float32[1].

    Claims: biased; not summable; ||x - C(x)||² = (1 - ||x||₁² / (n ||x||²)) ||x||². If a value is
      not finite, no decoded value is finite.

    Example:
      >>> x = jnp.array([3.0, -1.0, 0.5, -1.5])
      >>> fg.decompress(fg.Sign(), fg.compress(fg.Sign(), x), like=x)
      Array([ 1.5, -1.5,  1.5, -1.5], dtype=float32)

    References:
      Karimireddy et al., ICML 2019, arXiv:1901.09847. Seide et al., Interspeech 2014.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("Sign", x)
        (words,) = _codes.pack_masks(x < 0)
        return Compressed(Payload(words, _finite.mean(jnp.abs(x), x.size)[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        negative = _codes.unpack_mask(payload.main, math.prod(like.shape))
        return jnp.where(negative, -payload.side, payload.side)


@value
class DynamicSign(Quantizer):
    """Quantizer: the sign of each value, and a scale that shrinks from step to step.

    With s_t = scale · decay^t in step t,

        C(x)_i = s_t / 2 where x_i >= 0, else -s_t / 2.

    Use this codec for the differences that `choco_sgd` and `beer` send. The scale must shrink more
    slowly than the differences, because C(x) cannot reach values larger than s_t. If all |x_i| are
    below s_t / 4, the error is larger than x. With scale 1 and decay 0.98, s_t becomes subnormal in
    float32 after 4,300 steps. Restart the state before then, with `scale` set to the current s_t.

    Args:
      scale: s_0, at least the largest magnitude in the first step.
      decay: 1/2 < decay <= 1; with a smaller decay, the scale shrinks faster than the error.

    Wire: x float32[n] -> main uint32[ceil(n/32)]; no scale.

    Claims: biased; not summable. If |x_i| <= s_t, then |x_i - C(x)_i| <= s_t / 2. Values beyond
      ±s_t, including NaN, are counted in `overflow`. Zero and NaN decode to s_t / 2.

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
        check_within("DynamicSign(scale)", self.scale, "(0, inf)", "use the largest first value.")
        check_within("DynamicSign(decay)", self.decay, "(0.5, 1]", "use 0.98.")

    def _now(self, step: Step) -> jax.Array:
        number = jnp.asarray(step.number, jnp.float32)
        return jnp.float32(self.scale) * jnp.exp2(number * jnp.float32(math.log2(self.decay)))

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("DynamicSign", x)
        beyond = ~(jnp.abs(x) <= self._now(step))
        (words,) = _codes.pack_masks(x < 0)
        return Compressed(Payload(words), jnp.sum(beyond, dtype=jnp.int32))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        half = self._now(step) / 2
        negative = _codes.unpack_mask(payload.main, math.prod(like.shape))
        return jnp.where(negative, -half, half).astype(like.dtype)


@value
class MeanMagnitude(Quantizer):
    """Quantizer: the mean of the non-zero values, in place of every value, zeros included.

    Use it for values of one sign, after `AlternatingSign` and `Threshold`.

    Wire: x float32[k] -> main float32[1].

    Claims: biased; not summable.

    Example:
      >>> fg.compress(fg.codecs.MeanMagnitude(), jnp.array([1.0, 3.0, 0.0])).main
      Array([2.], dtype=float32)

    References:
      Fang et al., JPDC 133, 2019, arXiv:1808.04357.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("MeanMagnitude", x)
        count = jnp.maximum(jnp.sum((x != 0).astype(jnp.float32)), 1.0)
        return Compressed(Payload(_finite.mean(x, count)[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return jnp.broadcast_to(payload.main, like.shape)


@value
class Ternary(Quantizer):
    """Quantizer: stochastic rounding of each value to -s, 0 or s.

    Let σ be the root mean square of the vector. |x_i| is first clipped to clip · σ. Then s is the
    largest |x_i|, and C(x)_i is s sign(x_i) with probability |x_i| / s, else 0.

    Args:
      clip: bound of |x_i| in units of σ, 2.5 in the paper. None: no clipping; one large value then
        makes most other values zero.

    Wire: x float32[n] -> main uint32[ceil(n/20)], side float32[1]: 1.6 bits per value.

    Claims: unbiased if `clip` is None; not summable (`QuantizedAllReduce` shares one scale between
      workers, and sums). If a value is not finite, all values decode to NaN.

    Differs from the paper: 1.6 bits per value, not 2. In the paper's code, σ is the deviation from
      the mean, and clipping sets s = clip · σ even if all values are smaller.

    Example:
      >>> x, step = jnp.array([0.0, 2.0, -2.0]), fg.Step.of(0)
      >>> fg.decompress(fg.codecs.Ternary(), fg.compress(fg.codecs.Ternary(), x, step=step), like=x)
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
        check_real("Ternary", x)
        x, scale = clipped(x, self.clip)
        digits = to_levels(x, scale, 1, uniform_noise(self, step, x.size)) + 1
        return Compressed(Payload(_codes.pack_digits(digits.astype(jnp.uint32), 3), scale[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        digits = _codes.unpack_digits(payload.main, 3, math.prod(like.shape))
        scale = jnp.where(jnp.isfinite(payload.side), payload.side, jnp.nan)
        return (digits.astype(jnp.float32) - 1) * scale


def check_clip(owner: str, clip: float | None) -> None:
    if clip is not None:
        check_within(f"{owner}(clip)", clip, "(0, inf)", "use clip=2.5, or None for no bound.")


def clipped(x: jax.Array, clip: float | None) -> tuple[jax.Array, jax.Array]:
    """Clip `x` at `clip` root mean squares; return the result and its largest magnitude."""
    top = _finite.largest(x)
    if clip is None:
        return x, top
    scaled = in_units(x, top, 1.0)  # prevents overflow of squares
    bound = jnp.minimum(clip * jnp.sqrt(jnp.mean(jnp.square(scaled))) * top, top)
    # If all squares underflow, do not clip. A NaN is not equal to 0 and is kept.
    bound = jnp.where(bound == 0, top, bound)
    return jnp.clip(x, -bound, bound), bound


Norm = Literal["l2", "max"]

LARGEST = float(np.finfo(np.float32).max) * (1 - 2**-20)
"""Upper bound of a norm, so that the largest level is finite after rounding."""


@value
class UniformQuantizer(Quantizer):
    """Quantizer: round each value stochastically to one of 2s + 1 evenly spaced levels.

    The vector is cut into buckets (QSGD's word for blocks). In a bucket v, v_i is decoded as

        ||v|| sign(v_i) (floor(l) + Bernoulli(l - floor(l))) / s,
        with l = s |v_i| / ||v||,   s = 2^(bits-1) - 1.

    Args:
      bits: width of a code, 2 <= bits <= 16; with 2 bits, s = 1 and the codes are ternary.
      bucket: d, number of values in a bucket. A larger d sends fewer norms and has a larger error.
      norm: "l2" (as in the paper), or "max", the largest magnitude in the bucket. Few values come
        near the l2 norm of a large bucket, so "l2" leaves the upper levels unused.

    Wire: x float32[n] -> main uint32[ceil(n · bits / 32)], side float32[ceil(n/bucket)].

    Claims: unbiased; not summable; E||x - C(x)||² <= min(d/s², √d/s) ||x||². If a value is not
      finite, all values of its bucket decode to NaN.

    Differs from the paper: codes have a fixed width; the paper's Elias codes vary in length.

    Example:
      >>> x, step = jnp.array([0.0, 2.0, -2.0]), fg.Step.of(0)
      >>> codec = fg.UniformQuantizer(bits=2, norm="max")
      >>> fg.decompress(codec, fg.compress(codec, x, step=step), like=x)
      Array([ 0.,  2., -2.], dtype=float32)

    References:
      Alistarh et al., NeurIPS 2017, arXiv:1610.02132 (QSGD).
    """

    bits: int = 4
    bucket: int = 512
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        check_count("UniformQuantizer(bits)", self.bits, "for one bit use Sign().", 2, 16)
        check_choice("UniformQuantizer(norm)", self.norm, get_args(Norm))
        check_count("UniformQuantizer(bucket)", self.bucket, "use bucket=512.")

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def _levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        check_real("UniformQuantizer", x)
        bucket = min(self.bucket, x.size)

        def encode(x: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = _shapes.rows(x, bucket)
            top, length = row_norms(rows)
            norms = jnp.minimum(length if self.norm == "l2" else top, LARGEST)
            uniform = _shapes.rows(uniform, bucket)
            codes = to_levels(rows, norms[:, None], self._levels, uniform) + self._levels
            codes = codes.ravel()[: x.size].astype(jnp.uint32)
            return _codes.pack(codes, self.bits), norms

        group = math.lcm(bucket, _codes.period(self.bits))
        uniform = uniform_noise(self, step, x.size)
        return Compressed(Payload(*_shapes.whole_then_rest(encode, group, x, uniform)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        codes = _codes.unpack(payload.main, self.bits, n).astype(jnp.float32) - self._levels
        norms = jnp.where(jnp.isfinite(payload.side), payload.side, jnp.nan)
        return codes * jnp.repeat(norms / self._levels, min(self.bucket, n))[:n]
