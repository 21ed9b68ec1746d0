"""Quantizers whose levels fit a distribution: geometric, Lloyd-Max and means of bins."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import check_count, value
from fftgrad.codecs import _quantizers
from fftgrad.ops import _codes, _finite, _platform, _shapes


@value
class LogQuantizer(Quantizer):
    """Quantizer: geometric levels between the smallest and the largest magnitude of the payload.

    Use it after a selector, which keeps magnitudes above a threshold. Let low and high be the
    smallest non-zero and the largest magnitude. L = 2^(N-1) cells of ratio r divide this range:

        r = (high / low)^(1/L),   cell j = [low r^j, low r^(j+1)),   c_j = 2 low r^(j+1) / (r + 1).

    The code of x holds the cell of |x| and the sign, and decodes to ±c_j. The choice of c_j has the
    smallest maximum relative error in the cell, (r - 1) / (r + 1) < 1. If some x is zero, the first
    code stands for zero, and L - 1 cells remain. For complex values, L = 2^N cells divide the
    modulus, and L sectors the angle. The modulus decodes to c_j cos(π/L), with the least error.

    Args:
      bits: N, 2 <= N <= 16.

    Wire: x float32[k] -> main uint32[ceil(kN/32)], side float32[2]; 2N bits for complex64[k].

    Claims: not summable. The relative error of a real value is at most (r - 1) / (r + 1), up to
      float32 rounding, and that of a complex value is below 1. Subnormal values count as zero. If a
      value is not finite, all values decode to NaN.

    Differs from the paper: the FFT paper's floats (`RangeFloat`) fit only the largest magnitude.

    Example:
      >>> x, codec = jnp.array([1.0, -9.0, 3.5, 0.0]), fg.LogQuantizer(bits=3)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x).round(1)
      Array([ 1.4, -5.8,  2.8,  0. ], dtype=float32)

    References:
      Miyashita et al., 2016, arXiv:1603.01025. Wang et al., HPDC 2020, arXiv:1811.08596 (range).
    """

    bits: int

    def __post_init__(self) -> None:
        check_count("LogQuantizer(bits)", self.bits, "for more bits use no quantizer.", 2, 16)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        width, b = self._widths(x)
        if _is_polar(x):
            magnitude = _modulus(x)
            sector = jnp.floor(jnp.angle(x) * (2**self.bits / (2 * math.pi))).astype(jnp.int32)
            sector &= 2**self.bits - 1
        else:
            values = _quantizers.as_real(x)
            magnitude, sector = jnp.abs(values), (values < 0).astype(jnp.int32)
        ends = Ends.of(magnitude)
        codes = (ends.cell(magnitude, 2**b) | sector << b).astype(jnp.uint32)
        return Compressed(Payload(_codes.pack(codes, width), ends.side))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        width, b = self._widths(like)
        ends = Ends.from_side(payload.side)
        whole = _finite.poison_unless(jnp.isfinite(ends.high))
        codes = _codes.unpack(payload.main, width, math.prod(like.shape))
        magnitude, sector = ends.middle(codes & np.uint32(2**b - 1), 2**b), codes >> np.uint32(b)
        if not _is_polar(like):
            return (jnp.where(sector == 1, -magnitude, magnitude) + whole).astype(like.dtype)
        half = math.pi / 2**self.bits
        modulus = magnitude * math.cos(half) + whole
        angle = (2 * half) * sector.astype(jnp.float32) + half
        return lax.complex(modulus * jnp.cos(angle), modulus * jnp.sin(angle))

    def _widths(self, like: Like) -> tuple[int, int]:
        """Return the bits of a code, and of the level in its low bits, below the sign or sector."""
        return (2 * self.bits, self.bits) if _is_polar(like) else (self.bits, self.bits - 1)


class Ends(NamedTuple):
    low: jax.Array  # smallest non-zero magnitude, float32[]
    high: jax.Array  # largest magnitude, float32[]; NaN if a value is not finite, 0 if all are 0
    zeros: jax.Array  # True if the first level stands for zero, bool[]

    @classmethod
    def of(cls, magnitude: jax.Array) -> "Ends":
        counts = magnitude >= _quantizers.TINY
        low = jnp.min(jnp.where(counts, magnitude, jnp.inf))
        high = _finite.largest(magnitude)
        high = jnp.where(high < _quantizers.TINY, 0.0, high)
        return cls(jnp.minimum(low, high), high, jnp.any(magnitude < _quantizers.TINY))

    @classmethod
    def from_side(cls, side: jax.Array) -> "Ends":
        return cls(jnp.abs(side[0]), side[1], side[0] < 0)

    @property
    def side(self) -> jax.Array:
        """Side part of the payload, float32[2]: low (negative if a value is zero), and high."""
        return jnp.stack([jnp.where(self.zeros, -self.low, self.low), self.high])

    def cell(self, magnitude: jax.Array, levels: int) -> jax.Array:
        """Return the level of each magnitude, int32."""
        cells = levels - self.zeros.astype(jnp.int32)
        width = self._width
        scale = jnp.where(width > 0, jnp.asarray(cells, jnp.float32) / width, 0.0)
        place = (_log2(magnitude) - _log2(self.low)) * scale
        cell = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, cells - 1)
        cell = cell + self.zeros.astype(jnp.int32)
        return jnp.where(magnitude < _quantizers.TINY, 0, cell)

    def middle(self, level: jax.Array, levels: int) -> jax.Array:
        """Return c_j of `LogQuantizer` for each level, float32."""
        zeros = self.zeros.astype(jnp.int32)
        cells = levels - zeros
        j = level.astype(jnp.int32) - zeros
        step = self._width / cells.astype(jnp.float32)
        # Multiply by the square root twice, because r^j <= high / low may overflow float32.
        root = jnp.exp2(j.astype(jnp.float32) * (0.5 * step))
        lower = jnp.clip(self.low * root * root, self.low, self.high)
        ratio = jnp.exp2(-step)
        # A factor below 2 by more than the rounding error keeps the relative error below 1.
        up = jnp.minimum(2.0 / (1.0 + ratio), 2.0 - 2.0**-14)
        return jnp.where(j < 0, 0.0, jnp.clip(lower * up, self.low, self.high))

    @property
    def _width(self) -> jax.Array:
        return _log2(self.high) - _log2(self.low)


def _is_polar(like: Like) -> bool:
    return jnp.issubdtype(like.dtype, jnp.complexfloating)


def _log2(magnitude: jax.Array) -> jax.Array:
    return jnp.log2(jnp.maximum(magnitude, _quantizers.TINY))


def _modulus(z: jax.Array) -> jax.Array:
    """Return |z| without squares that overflow or underflow."""
    re, im = jnp.abs(z.real), jnp.abs(z.imag)
    most = jnp.maximum(re, im)
    share = jnp.minimum(re, im) / jnp.where(most < _quantizers.TINY, 1.0, most)
    # Add x - x, which is NaN if x is not finite, because `maximum` and `minimum` may drop a NaN.
    return most * jnp.sqrt(1.0 + jnp.square(share)) + (re - re) + (im - im)


@value
class LloydMax(Quantizer):
    """Quantizer: the 2^bits Lloyd-Max centroids of a normal distribution, with a scale per block.

    For each block x of d values, the values of y = √d x / ||x|| are rounded to the nearest
    Lloyd-Max centroids q of N(0, 1). The block decodes to S q with S = ||x|| √d / <y, q>, so that
    <S q, x> = ||x||². After a random rotation, `chain(Hadamard(), LloydMax())`, the values are
    nearly normally distributed, and the codec is nearly unbiased.

    Args:
      bits: width of a code, 1 <= bits <= 6. One bit is DRIVE, more bits are EDEN.
      block: d, number of values with a common scale; use the block of the rotation.

    Wire: x float32[n] -> main uint32[ceil(n · bits / 32)], side float32[ceil(n/block)].

    Claims: not summable; not claimed to be unbiased, because the proof needs a uniform rotation. If
      a value is not finite, or ||x|| overflows float32, all values of the block decode to NaN.

    Differs from the paper: only whole numbers of bits per value.

    Example:
      >>> x, codec = jnp.array([1.0, -1.0, 1.0, 1.0]), fg.codecs.LloydMax(bits=1)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 1., -1.,  1.,  1.], dtype=float32)

    References:
      Vargaftik et al., NeurIPS 2021, arXiv:2105.08339 (DRIVE); ICML 2022, arXiv:2108.08842 (EDEN).
    """

    bits: int = 1
    block: int = 4096

    def __post_init__(self) -> None:
        check_count("LloydMax(bits)", self.bits, "for more bits use RangeFloat.", 1, 6)
        check_count("LloydMax(block)", self.block, "use block=4096.")

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _quantizers.check_real("LloydMax", x)
        block = min(self.block, x.size)
        centroids = _centroids(self.bits)
        bounds = (centroids[1:] + centroids[:-1]) / 2

        def encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = _shapes.rows(x, block)
            _, norms = _quantizers.row_norms(rows)
            y = _quantizers.in_units(rows, norms[:, None], math.sqrt(block))
            above = [(y > bound).astype(jnp.uint32) for bound in bounds]
            codes = functools.reduce(jnp.add, above)
            projection = jnp.sum(y * _look_up(codes, centroids), axis=1)
            scales = norms * (math.sqrt(block) / jnp.where(projection > 0, projection, 1.0))
            return _codes.pack(codes.ravel()[: x.size], self.bits), scales

        group = math.lcm(block, _codes.period(self.bits))
        return Compressed(Payload(*_shapes.whole_then_rest(encode, group, x)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        codes = _codes.unpack(payload.main, self.bits, n)
        scales = jnp.where(jnp.isfinite(payload.side), payload.side, jnp.nan)
        scales = jnp.repeat(scales, min(self.block, n))[:n]
        return scales * _look_up(codes, _centroids(self.bits))


def _look_up(codes: jax.Array, values: np.ndarray | jax.Array) -> jax.Array:
    # XLA vectorizes selects between few values, but not a gather.
    values = values.astype(np.float32)
    out = jnp.full(codes.shape, values[0])
    for code in range(1, len(values)):
        out = jnp.where(codes >= code, values[code], out)
    return out


@functools.cache
def _centroids(bits: int) -> np.ndarray:
    """Solve by Newton: a centroid is the mean of N(0, 1) between midpoints to its neighbors."""
    centroids = np.linspace(-2.0, 2.0, 2**bits) if bits > 1 else np.array([-1.0, 1.0])
    for _ in range(12):
        bounds = np.array([-math.inf, *(centroids[1:] + centroids[:-1]) / 2, math.inf])
        density = np.array([math.exp(-b * b / 2) / math.sqrt(2 * math.pi) for b in bounds])
        below = np.array([0.5 * (1 + math.erf(b / math.sqrt(2))) for b in bounds])
        mass = np.diff(below)
        means = -np.diff(density) / mass
        # Derivative of each mean by the centroids, which move its bounds.
        ends = np.where(np.isfinite(bounds), bounds, 0.0)
        up = density[1:] * (ends[1:] - means) / (2 * mass)
        down = density[:-1] * (means - ends[:-1]) / (2 * mass)
        slope = np.diag(up + down) + np.diag(up[:-1], 1) + np.diag(down[1:], -1)
        centroids += np.linalg.solve(np.eye(len(centroids)) - slope, means - centroids)
    return centroids


SPAN = 6.0
"""Width of all bins together, in standard deviations."""


@value
class BinMeans(Quantizer):
    """Quantizer: 2^bits bins of equal width around the mean, each decoded as its own mean.

    Let m be the mean of the vector, σ its standard deviation and B = 2^bits. A value v has the code

        q = clip(round((v - m) / (6σ / B) + B/2), 0, B - 1),

    and decodes to the mean of all values with this code. With one bit, the bins meet at m.

    Args:
      bits: width of a code, 1 <= bits <= 4; SparseLoCo uses 2.

    Wire: x float32[n] -> main uint32[ceil(n · bits / 32)], side float32[2^bits].

    Claims: biased, but the sum of all values is exact; not summable. If a value is not finite, all
      values decode to NaN.

    Differs from the paper: σ divides by n, in the paper's code by n - 1. With one bit, the paper's
      formula would put nearly all values into one bin.

    Example:
      >>> x, codec = jnp.array([-5.0, -4.0, 4.0, 5.0]), fg.codecs.BinMeans(bits=2)
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([-4.5, -4.5,  4.5,  4.5], dtype=float32)

    References:
      Sarfi et al., 2025, arXiv:2508.15706; 2026, arXiv:2603.08163.
    """

    bits: int = 2

    def __post_init__(self) -> None:
        check_count("BinMeans(bits)", self.bits, "for more bits use LogQuantizer.", 1, 4)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _quantizers.check_real("BinMeans", x)
        top, _ = _quantizers.row_norms(x[None])
        y = _quantizers.in_units(x, top[0], 1.0)  # prevents overflow of squares
        # XLA may recompute the codes for each reader with different rounding. Then a value could be
        # sent with one code, but count in the mean of another.
        kept = lambda y: lax.optimization_barrier(self._codes(y))  # noqa: E731
        codes = _platform.dependent(y, cpu=self._codes_in_a_loop, default=kept)
        means = jnp.stack([_mean_where(codes == code, y) for code in range(2**self.bits)])
        side = means * _quantizers.divisor(top[0])
        return Compressed(Payload(_codes.pack(codes, self.bits), side))

    def _codes(self, y: jax.Array) -> jax.Array:
        bins = 2**self.bits
        middle = bins / 2 if self.bits > 1 else 0.5
        centred = y - jnp.sum(y) / y.size
        width = SPAN / bins * jnp.sqrt(jnp.sum(jnp.square(centred)) / y.size)
        places = jnp.round(centred / _quantizers.divisor(width) + middle)
        return jnp.clip(places, 0, bins - 1).astype(jnp.uint32)

    def _codes_in_a_loop(self, y: jax.Array) -> jax.Array:
        # XLA for CPUs drops barriers too early, but keeps the result of a loop if the number
        # of turns is unknown. So the number depends on the data: 2 if y[0] is not finite, else 1.
        start = jnp.isfinite(y[0]).astype(jnp.int32), jnp.zeros_like(y, jnp.uint32)
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, self._codes(y)), start)[1]

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        codes = _codes.unpack(payload.main, self.bits, like.shape[0])
        means = jnp.where(jnp.all(jnp.isfinite(payload.side)), payload.side, jnp.nan)
        return _look_up(codes, means)


def _mean_where(condition: jax.Array, y: jax.Array) -> jax.Array:
    count = jnp.sum(condition.astype(jnp.float32))
    return jnp.sum(jnp.where(condition, y, 0.0)) / jnp.maximum(count, 1.0)
