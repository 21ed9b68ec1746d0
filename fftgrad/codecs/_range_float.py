"""Floating-point quantizers of N bits: the range is given, or fitted to each payload."""

import dataclasses
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check, check_choice, check_count, value
from fftgrad.codecs import _quantizers
from fftgrad.ops import _codes, _finite, _positions

Rounding = Literal["nearest", "truncate", "stochastic"]


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

    def encode(self, x: jax.Array, rounding: Rounding, noise: jax.Array) -> jax.Array:
        """Encode float32[k] as codes uint32[k]; `noise` is random bits uint32[k], or zero."""
        shift = 23 - self.m
        magnitude = jnp.abs(x)
        low = {
            "nearest": jnp.uint32((1 << shift) >> 1),
            "truncate": jnp.uint32(0),
            "stochastic": noise & jnp.uint32((1 << shift) - 1),
        }[rounding]
        # The comparison avoids eps / 2, which may be subnormal and be flushed to zero.
        to_eps = {
            "nearest": 2 * magnitude >= self.eps,
            "truncate": jnp.zeros(x.shape, bool),
            "stochastic": (noise >> 8).astype(jnp.float32) * 2.0**-24 * self.eps < magnitude,
        }[rounding]
        number = (lax.bitcast_convert_type(magnitude, jnp.uint32) + low) >> shift
        index = number.astype(jnp.int32) - self.base + 1
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


def _number_of(value: float, m: int, *, rounds: bool) -> int:
    """Return b(value) of a positive value (`RangeFloat`), rounded down or to nearest."""
    half = (1 << (23 - m)) >> 1 if rounds else 0
    return min((int(np.float32(value).view(np.int32)) + half) >> (23 - m), _last(m))


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


def check_format(owner: str, bits: int, mantissa: int | None) -> None:
    check_count(f"{owner}(bits)", bits, "for one bit keep signs only.", 2, 16)
    if mantissa is not None:
        remedy = f"use mantissa={best_mantissa(bits)}."
        check_count(f"{owner}(mantissa)", mantissa, remedy, 1, bits)


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

    Magnitudes below eps become 0 or eps: the nearest of the two, 0 if truncating, or at random.

    Args:
      bits: N, 2 <= N <= 16.
      mantissa: m, 1 <= m <= N. None: the m with the smallest expected squared error for normally
        distributed values with max at 5 standard deviations. Heavier tails need a smaller m.
      rounding: "nearest", "truncate" (as in the paper) or "stochastic" (draws from `step.local`).

    Wire: x float32[k] -> main uint32[ceil(kN/32)], side float32[]; complex64[k] as float32[2k].

    Claims: not summable; unbiased if stochastic. The relative error of a value with |x| >= eps is
      at most 2^-(m+1) (nearest) or 2^-m (others). If a value is not finite, all decode to NaN.

    Differs from the paper: this codec rounds to nearest by default, and fits the range to each
      payload (`FixedRangeFloat` does not). Formulas give m and eps; the paper searches for them.

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

    def __post_init__(self) -> None:
        check_format("RangeFloat", self.bits, self.mantissa)
        check_choice("RangeFloat(rounding)", self.rounding, get_args(Rounding))

    @property
    def m(self) -> int:
        """Number of mantissa bits, given or chosen."""
        return best_mantissa(self.bits) if self.mantissa is None else self.mantissa

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        values = _quantizers.as_real(x)
        largest = _finite.largest(values)
        noise = jnp.zeros((), jnp.uint32)
        if self.rounding == "stochastic":
            noise = _quantizers.noise_bits(self, step, values.size)
        codes = self._window(largest).encode(values, self.rounding, noise)
        return Compressed(Payload(_codes.pack(codes, self.bits), largest))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, _quantizers.real_size(like))
        values = self._window(payload.side).decode(codes)
        values = jnp.where(jnp.isfinite(payload.side), values, jnp.nan)
        return _quantizers.from_real(values, like)

    def _window(self, largest: jax.Array) -> Window:
        """Return the symmetric window that reaches up to `largest`."""
        shift, each = 23 - self.m, 2 ** (self.bits - 1) - 1
        half, most = (1 << shift) >> 1, (1 << shift) - 1
        up = {"nearest": half, "truncate": 0, "stochastic": most}[self.rounding]
        number = (lax.bitcast_convert_type(largest, jnp.int32) + up) >> shift
        # eps must be a normal number, because accelerators flush subnormal numbers to zero.
        base = jnp.maximum(jnp.minimum(number, _last(self.m)) - each + 1, 1 << self.m)
        return Window(base, each, each, self.m)


@value
class FixedRangeFloat(Quantizer):
    """Quantizer: the floats of `RangeFloat` over a given range, which may be asymmetric.

    The codes are as in `RangeFloat`, with base = b(eps). There are P positive values from eps to
    `maximum` and Q negative values from -eps to `minimum`, with P + Q + 1 <= 2^N.

    Args:
      bits: N, 2 <= N <= 16.
      maximum: largest value.
      minimum: most negative value. None: -maximum.
      eps: smallest positive value. None: as small as the codes allow.
      mantissa: as in `RangeFloat`.
      rounding: "nearest" or "truncate".

    Wire: x float32[k] -> main uint32[ceil(kN/32)]; complex64[k] as float32[2k], real parts first.

    Claims: biased; not summable. Values of magnitude >= eps in the range have the relative errors
      of `RangeFloat`. Values out of range, including NaN, saturate and are counted in `overflow`.

    Raises:
      ValueError: if the codes do not reach from eps to the ends of the range.

    Example:
      >>> x = jnp.array([0.256, -2.5, 0.01])
      >>> codec = fg.codecs.FixedRangeFloat(bits=8, mantissa=3, maximum=2.0, eps=0.125)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0.25, -2.  ,  0.  ], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, section 3.1.2.
    """

    bits: int
    maximum: float
    minimum: float | None = None
    eps: float | None = None
    mantissa: int | None = None
    rounding: Literal["nearest", "truncate"] = "nearest"

    def __post_init__(self) -> None:
        check_format("FixedRangeFloat", self.bits, self.mantissa)
        check_choice("FixedRangeFloat(rounding)", self.rounding, ("nearest", "truncate"))
        low, high = self._range
        least = float(np.finfo(np.float32).tiny)
        eps = least if self.eps is None else self.eps
        argument = "FixedRangeFloat(minimum, eps, maximum)"
        fine = math.isfinite(high - low) and least <= eps <= min(high, -low)
        rule = "have minimum <= -eps < eps <= maximum, all finite"
        check(fine, argument, rule, (low, eps, high), "leave eps out to fit it.")
        _, positive, negative, _ = self._window()
        fine = min(positive, negative) >= 1 and positive + negative < 2**self.bits
        rule = f"take less than {2**self.bits} codes, and one at least on each side"
        remedy = "use a more even range, a larger eps or more bits."
        check(fine, argument, rule, f"{positive} and {negative}", remedy)

    @classmethod
    def tuned(cls, minimum: float, maximum: float, bits: int) -> "FixedRangeFloat":
        """Constructor: the paper's tuning of a fixed range.

        For each m, the paper searches for the eps at which the most negative code decodes to
        `minimum`. A formula gives this eps here. The paper has no rule for m; see `RangeFloat`.

        Args:
          minimum: most negative value, for example -1.
          maximum: largest value, for example 1.
          bits: N, the width of a code.
        """
        free = cls(bits, maximum, minimum, rounding="truncate")
        eps = float(np.int32(int(free._window().base) << (23 - free.m)).view(np.float32))
        return dataclasses.replace(free, mantissa=free.m, eps=eps)

    @property
    def m(self) -> int:
        """Number of mantissa bits, given or chosen."""
        return best_mantissa(self.bits) if self.mantissa is None else self.mantissa

    @property
    def _range(self) -> tuple[float, float]:
        return (-self.maximum if self.minimum is None else self.minimum), self.maximum

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        values = _quantizers.as_real(x)
        low, high = self._range
        inside = (values >= low) & (values <= high)
        overflow = values.size - _positions.count(*_codes.pack_masks(inside))
        codes = self._window().encode(values, self.rounding, jnp.zeros((), jnp.uint32))
        return Compressed(Payload(_codes.pack(codes, self.bits)), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, _quantizers.real_size(like))
        return _quantizers.from_real(self._window().decode(codes), like)

    def _window(self) -> Window:
        """Return the window of the range; if eps is None, the window that uses all codes."""
        m, rounds = self.m, self.rounding == "nearest"
        bottom, top = (_number_of(abs(end), m, rounds=rounds) for end in self._range)
        if self.eps is None:
            base = max(-((2**self.bits - top - bottom - 3) // 2), 1 << m)
        else:
            base = _number_of(self.eps, m, rounds=False)
        return Window(base, top - base + 1, bottom - base + 1, m)
