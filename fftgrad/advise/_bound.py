"""The bits of an ideal entropy coder: what a codec that knows nothing of places cannot go below."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DEAD_ZONES = (0.5, 0.6, 0.8, 1.0, 1.2)
"""In steps: what is smaller is not sent."""

RANGE, HALVINGS = 14.0, 18
"""How far below the largest magnitude a step may be, in natural logarithms, and how it is found."""


class Sorted(NamedTuple):
    """The magnitudes of a vector in ascending order, and the sums of those before each."""

    magnitude: Array
    sums: Array
    squares: Array


class Bound:
    """Bits of an entropy-coded scalar quantizer (ECSQ) of rows of coefficients.

    Uniform steps with a dead zone, each level at the mean of what falls into it, and as many bits
    as the zero-order entropy of the levels has. All rows have the step in common, and each an
    entropy of its own.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = [_sorted(row) for row in rows]
        self._total = sum(float(row.squares[-1]) for row in self._rows)
        self._largest = max(float(row.magnitude[-1]) for row in self._rows)

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
        losses, bits = zip(*(_quantized(row, edges) for row in self._rows), strict=True)
        return sum(losses), sum(bits) / len(bits)


def _sorted(row: Array) -> Sorted:
    magnitude = np.sort(np.abs(row).astype(np.float64))
    before = np.zeros(1)
    sums = np.concatenate([before, np.cumsum(magnitude)])
    return Sorted(magnitude, sums, np.concatenate([before, np.cumsum(np.square(magnitude))]))


def _quantized(row: Sorted, edges: Array) -> tuple[float, float]:
    n = row.magnitude.size
    places = np.searchsorted(row.magnitude, edges, side="right")
    count = np.diff(places)
    full = count > 0
    squares, sums = np.diff(row.squares[places])[full], np.diff(row.sums[places])[full]
    lost = float(row.squares[places[0]]) + float(np.sum(squares - sums**2 / count[full]))
    sent = n - places[0]
    shares = np.concatenate([[places[0]], count[full]]) / n
    shares = shares[shares > 0]
    return max(0.0, lost), float(-np.sum(shares * np.log2(shares)) + sent / n)  # with signs
