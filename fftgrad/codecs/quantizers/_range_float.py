"""Floating-point numbers of N bits, over the range of the data or over one that is given."""

import dataclasses
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_choice, value
from fftgrad.codecs.quantizers import _window
from fftgrad.codecs.quantizers._window import Rounding, Window
from fftgrad.ops import _finite
from fftgrad.ops.packing import _bitmap, _codes


@value
class RangeFloat(Quantizer):
    """Quantizer: N-bit floats with m mantissa bits, up to the largest magnitude of the payload.

    The top bits of a float32, b(x) = bits(|x|) >> (23 - m), count the values with m mantissa bits
    from 0 upwards: evenly spaced inside a binade, twice as far apart in the next. An N-bit code is
    a window of that count. With max the largest magnitude, which is sent along, P = 2^(N-1) - 1,
    base = b(max) - P + 1 and eps the value that base stands for, the codes are

        0                     zero
        1 ... P               eps ... max,         code = b(x) - base + 1
        P + 1 ... 2P          -eps ... -max,       code = P + b(x) - base + 1.

    Values below eps become 0 or eps, whichever is nearer (0 when truncating; by chance when
    rounding stochastically).

    Args:
      bits: N, 2 <= N <= 16.
      mantissa: m, 1 <= m <= N. None: the m with the smallest expected squared error,
        3/7 · 4^-m + √(2/π) · (5 eps/max)³ up to a factor, for normal values whose largest is 5
        standard deviations. Heavier tails, as of layers of different scale, want a smaller m.
      rounding: "nearest", "truncate" (the paper's) or "stochastic" (draws from `step.local`).

    Wire: x float32[k] -> main uint32[ceil(kN/32)], side float32[]; 2k for complex64[k], real parts
      first.

    Claims: relative error of every value with |x| >= eps at most 2^-(m+1) (nearest) or 2^-m
      (truncate); not summable; unbiased if stochastic. A payload with a NaN or an infinity decodes
      to NaN throughout.

    Differs from the paper: rounds to nearest unless told to truncate; fits the range to each
      payload (`FixedRangeFloat` does not); m and eps in closed form, not by a search
      (`FixedRangeFloat.tuned`); zero, tiny values and negative codes, on which the paper is silent,
      as above.

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
        _window.check_format("RangeFloat", self.bits, self.mantissa)
        check_choice("RangeFloat(rounding)", self.rounding, get_args(Rounding))

    @property
    def m(self) -> int:
        """The number of mantissa bits, given or chosen."""
        return _window.mantissa(self.mantissa, self.bits)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        values = _window.as_real("RangeFloat", x)
        largest = _finite.largest(values)
        noise = _window.noise(self, self.rounding, step, values.size)
        codes = self._window(largest).encode(values, self.rounding, noise)
        return Compressed(Payload(_codes.pack(codes, self.bits), largest))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, _window.count(like))
        values = self._window(payload.side).decode(codes)
        values = jnp.where(jnp.isfinite(payload.side), values, jnp.nan)
        return _window.shaped(values, like)

    def _window(self, largest: jax.Array) -> Window:
        codes = _window.codes(self.bits)
        return _window.fitted(largest, codes, self.m, self.rounding)


@value
class FixedRangeFloat(Quantizer):
    """Quantizer: the floats of `RangeFloat` over a range that is given and need not be symmetric.

    With base = b(eps), P values from eps to `maximum` and Q from -eps to `minimum`, the codes are

        0                     zero
        1 ... P               eps ... maximum,     code = b(x) - base + 1
        P + 1 ... P + Q       -eps ... minimum,    code = P + b(x) - base + 1,

    with P + Q + 1 <= 2^N. Values beyond the range saturate.

    Args:
      bits: N, 2 <= N <= 16.
      maximum: largest value.
      minimum: most negative value. None: -maximum.
      eps: smallest positive value. None: as small as the codes allow.
      mantissa: as in `RangeFloat`.
      rounding: "nearest", "truncate" or "stochastic".

    Wire: x float32[k] -> main uint32[ceil(kN/32)]; 2k for complex64[k], real parts first.

    Claims: the errors of `RangeFloat` for eps <= |x| <= max; biased; not summable. What is out of
      range saturates, NaN as well, and is counted in `overflow`; the exchange's header carries the
      finite flag.

    Differs from the paper: as `RangeFloat` does, but for the range.

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
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        owner = "FixedRangeFloat"
        _window.check_format(owner, self.bits, self.mantissa)
        check_choice(f"{owner}(rounding)", self.rounding, get_args(Rounding))
        minimum, maximum = self._range
        least = float(np.finfo(np.float32).tiny)
        if not (
            minimum < 0 and least <= min(maximum, -minimum) and math.isfinite(maximum - minimum)
        ):
            raise ValueError(
                f"{owner}(minimum, maximum): must be finite, minimum < 0 < maximum, got {minimum} "
                f"and {maximum}; a one-sided range is not supported."
            )
        if self.eps is not None and not least <= self.eps <= min(maximum, -minimum):
            raise ValueError(
                f"{owner}(eps): must be positive and inside the range ({minimum}, {maximum}), got "
                f"{self.eps}; leave it out to fit it."
            )
        window, codes = self._window(), _window.codes(self.bits)
        if min(window.positive, window.negative) < 1:
            raise ValueError(
                f"{owner}(minimum, maximum): {self.bits} bits do not reach down to the smaller "
                f"side, got {minimum} and {maximum}; take a more even range or more bits."
            )
        if window.positive + window.negative > codes:
            raise ValueError(
                f"{owner}(eps): {self.bits} bits with mantissa {self.m} have {codes} codes, got a "
                f"range that needs {window.positive + window.negative}; raise eps, or take fewer "
                "mantissa bits."
            )

    @classmethod
    def tuned(cls, minimum: float, maximum: float, bits: int) -> "FixedRangeFloat":
        """Constructor: the paper's tuning of a fixed range.

        For each m the paper moves eps until the most negative code decodes to `minimum`; that eps
        has a closed form. The paper states no rule for m; ours has the smallest expected error.

        Args:
          minimum: most negative value, for example -1.
          maximum: largest value, for example 1.
          bits: N.

        Returns:
          A FixedRangeFloat with `mantissa` and `eps` filled in, which truncates.

        Example:
          >>> fg.codecs.FixedRangeFloat.tuned(-1.0, 1.0, bits=10).m
          6
        """
        free = cls(bits, maximum, minimum, rounding="truncate")
        eps = _window.value_of(int(free._window().base), free.m)
        return dataclasses.replace(free, mantissa=free.m, eps=eps)

    @property
    def m(self) -> int:
        """The number of mantissa bits, given or chosen."""
        return _window.mantissa(self.mantissa, self.bits)

    @property
    def _range(self) -> tuple[float, float]:
        return (-self.maximum if self.minimum is None else self.minimum), self.maximum

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        values = _window.as_real("FixedRangeFloat", x)
        low, high = self._range
        inside = (values >= low) & (values <= high)
        overflow = values.size - _bitmap.count(*_bitmap.pack(inside))
        noise = _window.noise(self, self.rounding, step, values.size)
        codes = self._window().encode(values, self.rounding, noise)
        return Compressed(Payload(_codes.pack(codes, self.bits)), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, _window.count(like))
        return _window.shaped(self._window().decode(codes), like)

    def _window(self) -> Window:
        low, high = self._range
        codes = _window.codes(self.bits)
        return _window.fixed(low, high, self.eps, codes, self.m, self.rounding)
