"""What codecs make of a sample: bits against error, beside an ideal entropy coder."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fftgrad as fg
from fftgrad.advise._gradient_files import Array
from fftgrad.advise._search_codec import DENSE, Family, filled, others, tried
from fftgrad.codecs import _chain

LEVEL_BITS = (4, 6)

EXACT = 32.0
"""Bits a value where nothing is lost."""


class Rate(NamedTuple):
    """What a codec costs on the sample, and what it loses.

    Attributes:
      codec: what it is, for a gradient of any size.
      ratio: how many times fewer bytes than float32 it was to send at most.
      bits: what it sends, in bits a value.
      error: the relative error.
      bound: bits a value of an ideal entropy coder at the same error, in the basis of the codec.
    """

    codec: fg.Codec
    ratio: float
    bits: float
    error: float
    bound: float

    @property
    def is_dense(self) -> bool:
        """Whether it sends something for every value."""
        return self.codec in DENSE

    @property
    def basis(self) -> fg.Codec:
        """The transform in the codec; `Identity()` if there is none."""
        return _basis(self.codec)


def measured(
    rows: Array, ratios: Sequence[float], compact: fg.Codec, tell: Callable[[str], object]
) -> tuple[Rate, ...]:
    """Candidates of `fg.advise.search_codec` at each of some sizes, the best of each size first.

    Sparse ones without a transform, and in the basis that is known to compact the energy; of all
    bases `fg.advise.search_codec` would compile three times as many programs.
    """
    n = rows.shape[1]
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    measure = functools.cache(functools.partial(tried, jnp.asarray(rows)))
    bases = dict.fromkeys((fg.Identity(), compact))
    families: list[Family] = [functools.partial(filled, basis) for basis in bases]
    families += others(compact, LEVEL_BITS, like)

    @functools.cache
    def bound(basis: fg.Codec) -> Bound:
        return Bound(_coefficients(basis, rows))

    found: list[Rate] = []
    for ratio in sorted(ratios, reverse=True):
        tell(f"codecs of {ratio:g} times fewer bytes")
        size = int(4 * n / ratio)
        codecs = [codec for family in families if (codec := family(size)) is not None]
        for codec, sent, error in sorted(map(measure, codecs), key=lambda row: row.error):
            ideal = bound(_basis(codec)).bits(error) if error else EXACT
            found.append(Rate(_of_any_size(codec, ratio, n), ratio, 8 * sent / n, error, ideal))
    return tuple(found)


def _basis(codec: fg.Codec) -> fg.Codec:
    return next((c for c in _chain.stages(codec) if isinstance(c, fg.Transform)), fg.Identity())


def _of_any_size(codec: fg.Codec, ratio: float, n: int) -> fg.Codec:
    """With a ratio in place of bytes, and a fraction in place of a number of coefficients."""
    stages = _chain.stages(codec)
    slots = n // 2 if any(isinstance(stage, fg.Fft) for stage in stages) else n

    def one(stage: fg.Codec) -> fg.Codec:
        if isinstance(stage, fg.Budget):
            return fg.Budget(ratio=ratio)
        if isinstance(stage, fg.TopK):
            return fg.TopK(fraction=min(1.0, float(f"{(stage.k or 1) / slots:.3g}")))
        return stage

    return fg.chain(*map(one, stages))


def _coefficients(transform: fg.Codec, rows: Array) -> Array:
    """The coefficients [r, m] of rows, as real numbers."""
    run = jax.jit(lambda x: transform.compress(x, (), fg.Step.of(0)).payload.main)
    out = np.stack([np.asarray(run(jnp.asarray(row))) for row in rows])
    return out.view(np.float32) if np.iscomplexobj(out) else out


DEAD_ZONES = (0.5, 0.6, 0.8, 1.0, 1.2)
"""In steps: what is smaller is not sent."""

RANGE, HALVINGS = 14.0, 18
"""How far below the largest magnitude a step may be, in natural logarithms, and how it is found."""


class Bound:
    """Bits of an entropy-coded scalar quantizer (ECSQ) of rows of coefficients.

    Uniform steps with a dead zone, each level at the mean of what falls into it, and as many bits
    as the zero-order entropy of the levels has. All rows have the step in common, and each an
    entropy of its own.
    """

    def __init__(self, rows: Array) -> None:
        self._sorted = np.sort(np.abs(rows).astype(np.float64))
        first = ((0, 0), (1, 0))
        self._sums = np.pad(np.cumsum(self._sorted, axis=1), first)
        self._squares = np.pad(np.cumsum(np.square(self._sorted), axis=1), first)
        self._total, self._largest = np.sum(self._squares[:, -1]), np.max(self._sorted)

    def bits(self, error: float) -> float:
        """Bits a coefficient for a relative error, in the best of the dead zones."""
        if error >= 1:
            return 0.0
        return min(self._in(zone, error) for zone in DEAD_ZONES)

    def _in(self, zone: float, error: float) -> float:
        high = math.log(self._largest)
        low, bits = high - RANGE, math.inf
        for _ in range(HALVINGS):
            step = math.exp((low + high) / 2)
            lost, found = self._at(zone, step)
            if math.sqrt(lost / self._total) > error:
                high = math.log(step)
            else:
                low, bits = math.log(step), found
        return bits

    def _at(self, zone: float, step: float) -> tuple[float, float]:
        """What is lost, and the bits a coefficient, averaged over the rows."""
        levels = max(1, math.ceil(self._largest / step - zone) + 1)
        edges = step * (zone + np.arange(levels + 1))
        rows = zip(self._sorted, self._sums, self._squares, strict=True)
        losses, bits = zip(*(_quantized(*row, edges) for row in rows), strict=True)
        return sum(losses), sum(bits) / len(bits)


def _quantized(
    magnitude: Array, before: Array, squares_before: Array, edges: Array
) -> tuple[float, float]:
    """Of ascending magnitudes, with the sums of those before each and of their squares."""
    n = magnitude.size
    places = np.searchsorted(magnitude, edges, side="right")
    count = np.diff(places)
    full = count > 0
    squares, sums = np.diff(squares_before[places])[full], np.diff(before[places])[full]
    lost = float(squares_before[places[0]] + np.sum(squares - sums**2 / count[full]))
    shares = np.concatenate([places[:1], count[full]]) / n
    shares = shares[shares > 0]
    signs = (n - places[0]) / n
    return max(0.0, lost), float(signs - np.sum(shares * np.log2(shares)))
