"""The bits of an ideal entropy coder: what a codec that knows nothing of places cannot go below."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

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
