"""Levels in geometric progression between the smallest and the largest magnitude."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_choice, value
from fftgrad.codecs.quantizers import _scale, _window
from fftgrad.ops import _finite
from fftgrad.ops.packing import _codes


@value
class LogLevels(Quantizer):
    """Quantizer: geometric levels between the smallest and the largest magnitude of the payload.

    Made for what a selector keeps, whose magnitudes begin at its threshold. With low the smallest
    magnitude that is not zero, high the largest, and L = 2^(N-1) cells of equal ratio

        r = (high / low)^(1/L),   cell j = [low r^j, low r^(j+1)),   c_j = 2 low r^(j+1) / (r + 1),

    a code is the cell of |x| and a sign, and decodes to ±c_j, whose largest relative error in the
    cell is least, (r - 1) / (r + 1): no value is worse than not sent. If there are zeros, they have
    the first code, and there are L - 1 cells. A complex value has L = 2^N cells of its modulus, and
    as many sectors of its angle; c_j is then shortened by cos(π/L), for the same reason.

    Args:
      bits: N, 2 <= N <= 16.
      rounding: "nearest"; or "truncate", to the lower end of the cell.

    Wire: x float32[k] -> main uint32[ceil(kN/32)], side float32[2]; 2N bits a
      value for complex64[k].

    Claims: relative error of every value at most (r - 1) / (r + 1) for nearest, 1 - 1/r for
      truncate, but for float32 rounding; less than 1 for complex values. Not summable. A payload
      with a NaN or an infinity decodes to NaN throughout; subnormal values count as zero.

    Differs from the paper: its floats (`FixedRangeFloat`, `RangeFloat`) are fitted to the largest
      magnitude alone, so with few bits most of what is kept falls below their smallest value.

    Example:
      >>> x, codec = jnp.array([1.0, -9.0, 3.5, 0.0]), fg.LogLevels(bits=3)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x).round(1)
      Array([ 1.4, -5.8,  2.8,  0. ], dtype=float32)

    References:
      Miyashita, Lee and Murmann, 2016, arXiv:1603.01025. Wang et al., HPDC 2020, arXiv:1811.08596,
      for a range tuned to the data.
    """

    bits: int
    rounding: Literal["nearest", "truncate"] = "nearest"

    def __post_init__(self) -> None:
        _window.check_format("LogLevels", self.bits, None)
        check_choice("LogLevels(rounding)", self.rounding, ("nearest", "truncate"))

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        if _is_polar(x):
            magnitude = _modulus(x)
            ends = Ends.of(magnitude)
            sector = jnp.floor(jnp.angle(x) * (2**self.bits / (2 * math.pi))).astype(jnp.int32)
            cell = ends.cell(magnitude, 2**self.bits)
            codes = cell | (sector & (2**self.bits - 1)) << self.bits
            return _compressed(codes, 2 * self.bits, ends)
        values = _window.as_real("LogLevels", x)
        magnitude, levels = jnp.abs(values), 2 ** (self.bits - 1)
        ends = Ends.of(magnitude)
        level = ends.cell(magnitude, levels)
        return _compressed(level | (values < 0).astype(jnp.int32) << self.bits - 1, self.bits, ends)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        ends = Ends.from_side(payload.side)
        whole = _finite.poison_unless(jnp.isfinite(ends.high))
        if _is_polar(like):
            (k,) = like.shape
            codes = _codes.unpack(payload.main, 2 * self.bits, k)
            level, sector = codes & np.uint32(2**self.bits - 1), codes >> np.uint32(self.bits)
            half = math.pi / 2**self.bits
            modulus = self._middle(ends, level, 2**self.bits) * math.cos(half) + whole
            angle = (2 * half) * sector.astype(jnp.float32) + half
            return lax.complex(modulus * jnp.cos(angle), modulus * jnp.sin(angle))
        codes = _codes.unpack(payload.main, self.bits, _window.count(like))
        level, levels = codes & np.uint32(2 ** (self.bits - 1) - 1), 2 ** (self.bits - 1)
        magnitude = self._middle(ends, level, levels)
        values = jnp.where(codes >> np.uint32(self.bits - 1) == 1, -magnitude, magnitude) + whole
        return _window.shaped(values, like)

    def _middle(self, ends: "Ends", level: jax.Array, levels: int) -> jax.Array:
        return ends.middle(level, levels, truncates=self.rounding == "truncate")


class Ends(NamedTuple):
    """The range that levels are fitted to.

    Attributes:
      low: the smallest magnitude that is not zero, float32[].
      high: the largest, float32[]; NaN if anything is not finite, zero if all is zero.
      zeros: whether the first level stands for zero, bool[].
    """

    low: jax.Array
    high: jax.Array
    zeros: jax.Array

    @classmethod
    def of(cls, magnitude: jax.Array) -> "Ends":
        """Those of a payload."""
        counts = magnitude >= _scale.TINY
        low = jnp.min(jnp.where(counts, magnitude, jnp.inf))
        high = _finite.largest(magnitude)
        high = jnp.where(high < _scale.TINY, 0.0, high)
        return cls(jnp.minimum(low, high), high, jnp.any(magnitude < _scale.TINY))

    @classmethod
    def from_side(cls, side: jax.Array) -> "Ends":
        """Those that `side` stands for."""
        return cls(jnp.abs(side[0]), side[1], side[0] < 0)

    @property
    def side(self) -> jax.Array:
        """What is sent of it, float32[2]: low, negative where there are zeros, and high."""
        return jnp.stack([jnp.where(self.zeros, -self.low, self.low), self.high])

    def cell(self, magnitude: jax.Array, levels: int) -> jax.Array:
        """The number of the level whose cell a magnitude is in, int32."""
        cells = levels - self.zeros.astype(jnp.int32)
        place = self._place(magnitude, cells)
        cell = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, cells - 1)
        cell = cell + self.zeros.astype(jnp.int32)
        return jnp.where(magnitude < _scale.TINY, 0, cell)

    def middle(self, level: jax.Array, levels: int, *, truncates: bool) -> jax.Array:
        """What a level stands for: a point in its cell, or the lower end; float32."""
        zeros = self.zeros.astype(jnp.int32)
        cells = levels - zeros
        j = level.astype(jnp.int32) - zeros
        lower = self._at(j, cells)
        if not truncates:
            ratio = jnp.exp2(-self._width / cells.astype(jnp.float32))
            # Below 2 by more than rounding, for the error is to be below 1.
            up = jnp.minimum(2.0 / (1.0 + ratio), 2.0 - 2.0**-14)
            lower = jnp.clip(lower * up, self.low, self.high)
        return jnp.where(j < 0, 0.0, lower)

    @property
    def _width(self) -> jax.Array:
        return _log2(self.high) - _log2(self.low)

    def _place(self, magnitude: jax.Array, cells: jax.Array | int) -> jax.Array:
        """Where between low and high, 0 and `cells`, it is on a logarithmic scale."""
        width = self._width
        scale = jnp.where(width > 0, jnp.asarray(cells, jnp.float32) / width, 0.0)
        return (_log2(magnitude) - _log2(self.low)) * scale

    def _at(self, place: jax.Array, cells: jax.Array) -> jax.Array:
        """The magnitude at a place."""
        step = self._width / cells.astype(jnp.float32)
        # Half-way twice, because high / low may be more than a float32 holds.
        root = jnp.exp2(place.astype(jnp.float32) * (0.5 * step))
        return jnp.clip(self.low * root * root, self.low, self.high)


def _is_polar(like: Like) -> bool:
    return jnp.issubdtype(like.dtype, jnp.complexfloating)


def _log2(magnitude: jax.Array) -> jax.Array:
    return jnp.log2(jnp.maximum(magnitude, _scale.TINY))


def _modulus(z: jax.Array) -> jax.Array:
    """|z|, without squares that overflow or vanish."""
    re, im = jnp.abs(z.real), jnp.abs(z.imag)
    most = jnp.maximum(re, im)
    share = jnp.minimum(re, im) / jnp.where(most < _scale.TINY, 1.0, most)
    # What is not finite may be dropped by the maximum and the minimum.
    return most * jnp.sqrt(1.0 + jnp.square(share)) + (re - re) + (im - im)


def _compressed(codes: jax.Array, bits: int, ends: Ends) -> Compressed:
    return Compressed(Payload(_codes.pack(codes.astype(jnp.uint32), bits), ends.side))
