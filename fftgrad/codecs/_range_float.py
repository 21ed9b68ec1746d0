"""Floating-point quantizer of N bits: the range is fitted to each payload, or given."""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check, check_choice, check_count, check_type, value
from fftgrad.codecs import _quantizers
from fftgrad.ops import _codes, _finite, _positions

Rounding = Literal["nearest", "truncate"]


class Window(NamedTuple):
    """Values that have a code: zero, and consecutive b(x) of `RangeFloat` on each side of zero."""

    base: jax.Array | int  # b(eps) of the smallest positive value, eps
    positive: int  # number of values from eps upwards
    negative: int  # number of values from -eps downwards
    m: int  # mantissa bits

    @property
    def eps(self) -> jax.Array:
        bits = jnp.asarray(self.base, jnp.int32) << (23 - self.m)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def encode(self, x: jax.Array, half: int) -> jax.Array:
        """Encode float32[k] as codes uint32[k]; `half` of the cut bits rounds, 0 truncates."""
        magnitude = jnp.abs(x)
        number = (lax.bitcast_convert_type(magnitude, jnp.uint32) + jnp.uint32(half)) >> 23 - self.m
        index = number.astype(jnp.int32) - self.base + 1
        # The comparison avoids eps / 2, which may be subnormal and be flushed to zero.
        to_eps = (half > 0) & (2 * magnitude >= self.eps)
        # A NaN is not below eps, so it saturates instead of becoming zero.
        index = jnp.where(magnitude < self.eps, to_eps.astype(jnp.int32), index)
        negative = x < 0
        index = jnp.minimum(index, jnp.where(negative, self.negative, self.positive))
        return jnp.where(negative & (index > 0), index + self.positive, index).astype(jnp.uint32)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Decode codes uint32[k] to float32[k], finite for any codes."""
        index = codes.astype(jnp.int32)
        negative = index > self.positive
        index = jnp.where(negative, jnp.minimum(index - self.positive, self.negative), index)
        number = jnp.minimum(index - 1 + self.base, _last(self.m))
        magnitude = lax.bitcast_convert_type(number << (23 - self.m), jnp.float32)
        magnitude = jnp.where(index > 0, magnitude, 0.0)
        return jnp.where(negative, -magnitude, magnitude)


def _last(m: int) -> int:
    return (255 << m) - 1


def best_mantissa(bits: int) -> int:
    """Return the m with the smallest expected squared error for normal values up to 5 sigma.

    For unit variance, the squared error is 3/7 · 4^-m from values above eps, and √(2/π) · eps³ from
    values below eps. Both omit the same constant factor, which depends on the rounding.
    """

    def error(m: int) -> float:
        eps = 5.0 * 2.0 ** (-(2 ** (bits - 1) - 2) / 2**m)
        return 3 / 7 * 4.0**-m + math.sqrt(2 / math.pi) * eps**3

    return min(range(1, bits + 1), key=error)


@value
class RangeFloat(Quantizer):
    """Quantizer: N-bit floats with m mantissa bits, up to the largest magnitude of the payload.

    The integer b(x) = bits(|x|) >> (23 - m) holds the exponent and the first m mantissa bits of a
    float32, and so numbers the floats with m mantissa bits by magnitude. For each sign, the codes
    cover P = 2^(N-1) - 1 of these numbers, up to b(max). The largest magnitude, max, is sent too.
    With base = b(max) - P + 1, and eps the value with b(eps) = base, the codes are

        0                     zero
        1 ... P               eps ... max,         code = b(x) - base + 1
        P + 1 ... 2P          -eps ... -max,       code = P + b(x) - base + 1.

    Magnitudes below eps become 0 or eps: the nearest of the two, or 0 if truncating.

    Args:
      bits: N, 2 <= N <= 16.
      mantissa: m, 1 <= m <= N. None: the m with the smallest expected squared error for normally
        distributed values with max at 5 standard deviations. Heavier tails need a smaller m.
      rounding: "nearest" or "truncate" (as in the paper).
      limits: a fixed range (minimum, maximum), such as (-1.0, 1.0) in the paper. It may have other
        numbers of positive and negative codes, P + Q + 1 <= 2^N; eps is as small as they allow.

    Wire: x float32[k] -> main uint32[ceil(kN/32)], side float32[], which `limits` leaves out;
      complex64[k] as float32[2k], real parts first.

    Claims: biased; not summable. The relative error of a value with |x| >= eps is at most 2^-(m+1)
      (nearest) or 2^-m (truncate). If a value is not finite, all decode to NaN; with `limits`,
      values out of range, including NaN, saturate and are counted in `overflow`.

    Differs from the paper: this codec rounds to nearest by default, and fits the range to each
      payload. Formulas give m and eps: the paper has no rule for m, and searches for the eps at
      which the most negative code decodes to `minimum`.

    Example:
      >>> x, codec = jnp.array([0.26, -2.0, 0.001]), fg.RangeFloat(bits=5, mantissa=2)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0.25, -2.  ,  0.  ], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, section 3.1.2.
    """

    bits: int
    mantissa: int | None = None
    rounding: Rounding = "nearest"
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_count("RangeFloat(bits)", self.bits, "for one bit keep signs only.", 2, 16)
        if self.mantissa is not None:
            remedy = f"use mantissa={best_mantissa(self.bits)}."
            check_count("RangeFloat(mantissa)", self.mantissa, remedy, 1, self.bits)
        check_choice("RangeFloat(rounding)", self.rounding, get_args(Rounding))
        if self.limits is not None:
            fine = type(self.limits) is tuple and [*map(type, self.limits)] == [float, float]
            remedy = "use (-1.0, 1.0)."
            check_type(fine, "RangeFloat(limits)", "be a tuple of two numbers", self.limits, remedy)
            low, high = self.limits
            fine = low < 0 < high and math.isfinite(high - low)
            window = self._window(None) if fine else Window(0, 0, 0, 0)
            rule = "be finite, below and above zero, and have a code for each sign"
            remedy = "use a more even range or more bits, or None to fit it."
            fine = min(window.positive, window.negative) >= 1
            check(fine, "RangeFloat(limits)", rule, self.limits, remedy)

    @property
    def m(self) -> int:
        """Number of mantissa bits, given or chosen."""
        return best_mantissa(self.bits) if self.mantissa is None else self.mantissa

    @property
    def _half(self) -> int:
        return 1 << 22 - self.m if self.rounding == "nearest" else 0

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        values = _quantizers.as_real(x)
        if self.limits is None:
            side, overflow = _finite.largest(values), 0
        else:
            inside = (values >= self.limits[0]) & (values <= self.limits[1])
            side, overflow = (), values.size - _positions.count(*_codes.pack_masks(inside))
        codes = self._window(side).encode(values, self._half)
        return Compressed(Payload(_codes.pack(codes, self.bits), side), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, _quantizers.real_size(like))
        values = self._window(payload.side).decode(codes)
        if self.limits is None:
            values = jnp.where(jnp.isfinite(payload.side), values, jnp.nan)
        return _quantizers.from_real(values, like)

    def _window(self, largest: PyTree) -> Window:
        """Return the window of `limits`, or else the symmetric window up to `largest`."""
        m, last = self.m, _last(self.m)
        if self.limits is not None:
            ends = np.abs(np.array(self.limits, np.float32)).view(np.int32)
            bottom, top = (min(int(end) + self._half >> 23 - m, last) for end in ends)
            base = max(-((2**self.bits - top - bottom - 3) // 2), 1 << m)
            return Window(base, top - base + 1, bottom - base + 1, m)
        number = (lax.bitcast_convert_type(largest, jnp.int32) + self._half) >> 23 - m
        each = 2 ** (self.bits - 1) - 1
        # eps must be a normal number, because accelerators flush subnormal numbers to zero.
        base = jnp.maximum(jnp.minimum(number, last) - each + 1, 1 << m)
        return Window(base, each, each, m)
