"""What a gradient, or a leaf of it, looks like."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fftgrad.advise import _workers
from fftgrad.advise._bases import BASES, dropped
from fftgrad.advise._sample import BLOCK

Array = npt.NDArray[Any]

BANDS = 16
LAGS = 8


class Figures(NamedTuple):
    """What `fg.advise.analyze` measures of the whole gradient and of each leaf.

    Where there is no figure, as without a second worker, or of zeros only, it is None.

    Attributes:
      name: the path of the leaf; of several, what they have in common.
      values: how many values it has in one gradient.
      sampled: how many of them were looked at, in each step and worker.
      energy: its share of the sum of squares, in [0, 1].
      zeros: the share of values that are exactly zero.
      kurtosis: mean of the fourth powers over the square of that of the squares: 3 for a Gaussian,
        1 for values of one magnitude, more for heavier tails.
      dropped: for each basis the relative errors of keeping the largest 10 %, 1 % and 0.1 %, and
        dropping the rest; counted in reals, so that a complex coefficient counts two.
      spectrum: the share of the energy in each of 16 bands of equal width, the lowest frequencies
        first, in blocks of 4096 values; 0.0625 each if it is flat.
      correlation: that of values 1 to 8 places apart.
      overlap: of two workers in one step, the share of places that the largest 1 % of both have in
        common; what chance gives is 0.01.
      cosine: between the gradients of two workers in one step.
      signal: the energy that workers have in common over that which each has of its own, which the
        cosine implies; infinite, and thus None, where all have the same.
    """

    name: str
    values: int
    sampled: int
    energy: float
    zeros: float
    kurtosis: float | None
    dropped: Mapping[str, Array]
    spectrum: Array | None
    correlation: Array | None
    overlap: float | None
    cosine: float | None
    signal: float | None

    @property
    def best(self) -> str:
        """The basis in which the largest 1 % hold most."""
        return min(self.dropped, key=lambda name: float(self.dropped[name][1]))


def of(name: str, values: int, rows: Array, steps: Array, energy: float) -> Figures:
    """The figures of rows [r, n], each of a step; `energy` is that of the whole gradient."""
    own = float(np.sum(np.square(rows, dtype=np.float64)))
    agreement = _workers.agreement(rows, steps)
    return Figures(
        name=name,
        values=values,
        sampled=rows.shape[1],
        energy=own / energy,
        zeros=float(np.mean(rows == 0)),
        kurtosis=_kurtosis(rows) if own else None,
        dropped={b.name: dropped(b.squares(rows), rows.shape[1], b.reals) for b in BASES},
        spectrum=_spectrum(rows) if own else None,
        correlation=_correlation(rows) if own else None,
        overlap=agreement.overlap,
        cosine=agreement.cosine,
        signal=agreement.signal,
    )


def _kurtosis(rows: Array) -> float:
    squares = np.square(rows, dtype=np.float64)
    return float(np.mean(np.square(squares)) / np.mean(squares) ** 2)


def _blocks(rows: Array) -> Array:
    fill = -rows.shape[1] % BLOCK
    return np.pad(rows, ((0, 0), (0, fill))).reshape(-1, BLOCK)


def _spectrum(rows: Array) -> Array:
    c = np.square(np.abs(np.fft.rfft(_blocks(rows), norm="ortho")))
    power: Array = np.add.reduce(c, axis=0, dtype=np.float64)
    power[1:-1] *= 2  # of a real block the upper half is not there
    bands = np.sum(power[:-1].reshape(BANDS, -1), axis=1)
    bands[-1] += power[-1]
    return bands / np.sum(bands)


def _correlation(rows: Array) -> Array:
    """Of values some places apart in a block, over the norms of both."""
    blocks = _blocks(rows)
    out = np.zeros(LAGS)
    for lag in range(1, LAGS + 1):
        one, other = blocks[:, :-lag].ravel(), blocks[:, lag:].ravel()
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        out[lag - 1] = one @ other / norms if norms else 0.0
    return out
