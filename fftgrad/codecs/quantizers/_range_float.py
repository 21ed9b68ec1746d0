"""Floating-point numbers of N bits over the range of the data."""

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import value
from fftgrad.codecs.quantizers import _window
from fftgrad.codecs.quantizers._window import Rounding, Window
from fftgrad.ops import _finite
from fftgrad.ops.packing import _codes


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

    Without a code for zero (`zero=False`) all move down by one, and P = 2^(N-1). Values below eps
    become 0 or eps, whichever is nearer (eps if there is no zero; 0 when truncating; by chance in
    proportion when rounding stochastically).

    Args:
      bits: N, 2 <= N <= 16.
      mantissa: m, 1 <= m <= N. None: the m with the smallest expected squared error for normal
        values whose largest is 5 standard deviations, 3/7 · 4^-m + √(2/π) · (5 eps/max)³ up to a
        common factor: rounding inside a binade, and what falls below eps. Data with heavier tails,
        such as a raw gradient of layers of different scale, wants a smaller m.
      rounding: "nearest", "truncate" (the paper's) or "stochastic" (draws from `step.local`).
      zero: whether zero has a code. Where zero cannot occur it may be False.

    Shapes: x float32[k] -> main uint32[ceil(kN/32)], side float32[];
      x complex64[k] -> main uint32[ceil(2kN/32)], real parts first.

    Wire: 4 ceil(kN/32) + 4 bytes (2k for complex).

    Claims: relative error of every value with |x| >= eps at most 2^-(m+1) (nearest) or 2^-m
      (truncate); not summable; unbiased if stochastic. A payload with a NaN or an infinity decodes
      to NaN throughout.

    Differs from the paper: rounds to nearest unless told to truncate; fits the range to each
      payload (`FixedRangeFloat` does not); m and eps in closed form, not by a search
      (`FixedRangeFloat.tuned`); zero, tiny values and negative codes, on which the paper is silent,
      as above.

    Raises:
      ValueError: if an argument is out of range; while tracing, if the input is not a float or
        complex vector, or rounding is stochastic and the step has no key.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> x = jnp.array([0.26, -2.0, 0.001])
      >>> codec = fg.RangeFloat(bits=5, mantissa=2)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0.25, -2.  ,  0.  ], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, section 3.1.2.
    """

    bits: int
    mantissa: int | None = None
    rounding: Rounding = "nearest"
    zero: bool = True

    def __post_init__(self) -> None:
        _window.check_format("RangeFloat", self.bits, self.mantissa, self.rounding, zero=self.zero)

    @property
    def m(self) -> int:
        """The number of mantissa bits, given or chosen."""
        return _window.mantissa(self.mantissa, self.bits, zero=self.zero)

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
        if not self.zero:
            values = jnp.where(payload.side == 0, 0.0, values)
        return _window.shaped(values, like)

    def _window(self, largest: jax.Array) -> Window:
        codes = _window.codes(self.bits, zero=self.zero)
        return _window.fitted(largest, codes, self.m, self.rounding, zero=self.zero)
