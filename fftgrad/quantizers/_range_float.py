"""Floating-point numbers of N bits over the range that the data needs."""

import dataclasses
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad import _hash
from fftgrad._base import Like, Payload, Rng, constructor_call
from fftgrad.packing import _bitmap, _codes
from fftgrad.quantizers import _window
from fftgrad.quantizers._window import Rounding, Window

MAX_BITS = 16


@dataclasses.dataclass(frozen=True, repr=False)
class RangeFloat:
    """Quantizer: N-bit floats with m mantissa bits, over the range (eps, max) and its mirror.

    The top bits of a float32, b(x) = bits(|x|) >> (23 - m), count the values with m mantissa bits
    from 0 upwards: evenly spaced inside a binade, twice as far apart in the next. An N-bit code is
    a window of that count. With base = b(eps) the codes are

        0                     zero
        1 ... P               eps ... max,         code = b(x) - base + 1
        P + 1 ... P + Q       -eps ... minimum,    code = P + b(x) - base + 1

    with P + Q + 1 <= 2^N. Without a code for zero (`zero=False`) all move down by one. Values
    beyond the range saturate; values below eps become 0 or eps, whichever is nearer (eps if there
    is no zero; 0 when truncating; by chance in proportion when rounding stochastically).

    Args:
      bits: N, 2 <= N <= 16.
      mantissa: m, 1 <= m <= N. None: the m with the smallest expected squared error for normal
        values whose largest is 5 standard deviations, 3/7 · 4^-m + √(2/π) · (5 eps/max)³ up to a
        common factor: rounding inside a binade, and what falls below eps. Data with heavier tails,
        such as a raw gradient of layers of different scale, wants a smaller m.
      rounding: "nearest", "truncate" (the paper's) or "stochastic" (draws from `rng.local`).
      maximum: largest value. None: the largest magnitude of the payload, fitted and sent with it.
      minimum: most negative value. None: -maximum.
      eps: smallest positive value. None: as small as the codes allow; P = Q = 2^(N-1) - 1 where
        the range is symmetric.
      zero: whether zero has a code. Where zero cannot occur it may be False: P = Q = 2^(N-1).

    Shapes: x float32[k] -> main uint32[ceil(kN/32)], side float32[] (fitted) or ();
      x complex64[k] -> main uint32[ceil(2kN/32)], real parts first.

    Wire: 4 ceil(kN/32) bytes (2k for complex), and 4 for a fitted range.

    Claims: relative error of every value with eps <= |x| <= max at most 2^-(m+1) (nearest) or 2^-m
      (truncate); not summable; unbiased if stochastic with a fitted range, else biased.
      Fitted: a payload with a NaN or an infinity decodes to NaN throughout. Fixed: what is out of
      range saturates, NaN as well, and is counted in `overflow`; the exchange's header carries the
      finite flag.

    Differs from the paper: rounds to nearest unless told to truncate; fits the range to each
      payload unless told one; m and eps in closed form, not by a search (`RangeFloat.tuned`);
      zero, tiny values and negative codes, on which the paper is silent, as above.

    Raises:
      ValueError: if an argument is out of range, or the codes do not reach from eps to max.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> x = jnp.array([0.256, -2.5, 0.01])
      >>> codec = fg.RangeFloat(bits=8, mantissa=3, maximum=2.0, eps=0.125)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0.25, -2.  ,  0.  ], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, section 3.1.2.
    """

    bits: int
    mantissa: int | None = None
    rounding: Rounding = "nearest"
    maximum: float | None = None
    minimum: float | None = None
    eps: float | None = None
    zero: bool = True

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= MAX_BITS:
            raise ValueError(
                f"RangeFloat(bits): must be in 2..{MAX_BITS}, got {self.bits}; for more bits use "
                "no quantizer, for one bit keep signs only."
            )
        if self.mantissa is not None and not 1 <= self.mantissa <= self.bits:
            raise ValueError(
                f"RangeFloat(mantissa): must be in 1..{self.bits}, got {self.mantissa}; use "
                f"mantissa={_window.best_mantissa(self._codes, self.bits)}."
            )
        if self.rounding not in get_args(Rounding):
            raise ValueError(
                f"RangeFloat(rounding): must be one of {get_args(Rounding)}, got "
                f"{self.rounding!r}; use 'nearest'."
            )
        if self.rounding == "stochastic" and not self.zero:
            raise ValueError(
                "RangeFloat(zero): stochastic rounding needs a code for zero to stay unbiased, got "
                "zero=False; use zero=True."
            )
        if self.maximum is None:
            if self.minimum is not None or self.eps is not None:
                raise ValueError(
                    "RangeFloat(maximum): must be given where minimum or eps is, got None; give "
                    "all of the range or leave it to be fitted."
                )
        else:
            self._check_range()

    def _check_range(self) -> None:
        minimum, maximum = self._range
        eps = self.eps
        least = float(np.finfo(np.float32).tiny)
        if not (
            minimum < 0 and least <= min(maximum, -minimum) and math.isfinite(maximum - minimum)
        ):
            raise ValueError(
                f"RangeFloat(minimum, maximum): must be finite, minimum < 0 < maximum, got "
                f"{minimum} and {maximum}; a one-sided range is not supported."
            )
        if eps is not None and not least <= eps <= min(maximum, -minimum):
            raise ValueError(
                f"RangeFloat(eps): must be positive and inside the range ({minimum}, {maximum}), "
                f"got {eps}; leave it out to fit it."
            )
        window = self._fixed_window()
        if min(window.positive, window.negative) < 1:
            raise ValueError(
                f"RangeFloat(minimum, maximum): {self.bits} bits do not reach down to the smaller "
                f"side, got {minimum} and {maximum}; take a more even range or more bits."
            )
        if window.positive + window.negative > self._codes:
            raise ValueError(
                f"RangeFloat(eps): {self.bits} bits with mantissa {self.m} have {self._codes} "
                f"codes, got a range that needs {window.positive + window.negative}; raise eps, "
                "or take fewer mantissa bits."
            )

    @classmethod
    def tuned(cls, minimum: float, maximum: float, bits: int) -> "RangeFloat":
        """Constructor: the paper's tuning of a fixed range.

        For each m the paper moves eps until the most negative code decodes to `minimum`, which
        leaves about half of the codes to the positive values. That eps has a closed form; among
        the m, of which the paper chooses without a stated rule, ours is the one with the smallest
        expected error.

        Args:
          minimum: most negative value, for example -1.
          maximum: largest value, for example 1.
          bits: N.

        Returns:
          A RangeFloat with `mantissa`, `maximum`, `minimum` and `eps` filled in, which truncates.

        Example:
          >>> import fftgrad as fg
          >>> fg.RangeFloat.tuned(-1.0, 1.0, bits=10).m
          6
        """
        free = cls(bits, rounding="truncate", maximum=maximum, minimum=minimum)
        eps = _window.value_of(int(free._fixed_window().base), free.m)
        return dataclasses.replace(free, mantissa=free.m, eps=eps)

    @property
    def m(self) -> int:
        """The number of mantissa bits, given or chosen."""
        return (
            _window.best_mantissa(self._codes, self.bits)
            if self.mantissa is None
            else self.mantissa
        )

    @property
    def summable(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic" and self.maximum is None

    @property
    def _range(self) -> tuple[float, float]:
        maximum = 1.0 if self.maximum is None else self.maximum
        return (-maximum if self.minimum is None else self.minimum), maximum

    @property
    def _codes(self) -> int:
        """How many codes stand for a value other than zero."""
        return 2**self.bits - self.zero

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        values = _as_real(x)
        if self.maximum is None:
            largest = jnp.max(jnp.abs(values))
            window, side, overflow = self._fitted_window(largest), largest, 0
        else:
            low, high = self._range
            inside = (values >= low) & (values <= high)
            window, side = self._fixed_window(), ()
            overflow = values.size - _bitmap.count(*_bitmap.pack(inside))
        codes = window.encode(values, self.rounding, self._noise(values.size, rng))
        return Payload(_codes.pack(codes, self.bits), side, overflow)

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
        count = math.prod(like.shape) * (2 if is_complex else 1)
        codes = _codes.unpack(payload.main, self.bits, count)
        if self.maximum is None:
            values = self._fitted_window(payload.side).decode(codes)
            values = jnp.where(jnp.isfinite(payload.side), values, jnp.nan)
            if not self.zero:
                values = jnp.where(payload.side == 0, 0.0, values)
        else:
            values = self._fixed_window().decode(codes)
        if is_complex:
            return lax.complex(*jnp.split(values, 2))
        return values.astype(like.dtype)

    def _fitted_window(self, largest: jax.Array) -> Window:
        return _window.fitted(largest, self._codes, self.m, self.rounding, zero=self.zero)

    def _fixed_window(self) -> Window:
        low, high = self._range
        return _window.fixed(
            low, high, self.eps, self._codes, self.m, self.rounding, zero=self.zero
        )

    def _noise(self, count: int, rng: Rng | None) -> jax.Array:
        if self.rounding != "stochastic":
            return jnp.zeros((), jnp.uint32)
        if rng is None:
            raise ValueError(
                f"{self!r}.compress(rng): stochastic rounding draws, got None; pass "
                "rng=fg.Rng.of(key), with another key for each call."
            )
        return _hash.keyed_bits(rng.local, count)


def _as_real(x: jax.Array) -> jax.Array:
    if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"RangeFloat.compress(x): must be a float or complex vector, got {x.dtype}"
            f"{list(x.shape)}; a chain has one quantizer, at its end."
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([x.real, x.imag])
    return x.astype(jnp.float32)
