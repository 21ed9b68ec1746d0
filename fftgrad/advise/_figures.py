"""What a gradient, or a leaf of it, looks like, and what those of workers have in common."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fftgrad.advise._bases import BASES, blocks, dropped
from fftgrad.advise._gradient_files import Array
from fftgrad.advise._sample import BLOCK

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
    overlap, cosine, signal = agreement(rows, steps)
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
        overlap=overlap,
        cosine=cosine,
        signal=signal,
    )


def _kurtosis(rows: Array) -> float:
    squares = np.square(rows, dtype=np.float64)
    return float(np.mean(np.square(squares)) / np.mean(squares) ** 2)


def _spectrum(rows: Array) -> Array:
    c = np.square(np.abs(np.fft.rfft(blocks(rows, BLOCK), norm="ortho")))
    power: Array = np.add.reduce(c, axis=(0, 1), dtype=np.float64)
    power[1:-1] *= 2  # of a real block the upper half is not there
    bands = np.sum(power[:-1].reshape(BANDS, -1), axis=1)
    bands[-1] += power[-1]
    return bands / np.sum(bands)


def _correlation(rows: Array) -> Array:
    """Of values some places apart in a block, over the norms of both."""
    whole = blocks(rows, BLOCK)
    out = np.zeros(LAGS)
    for lag in range(1, LAGS + 1):
        one, other = whole[..., :-lag].ravel(), whole[..., lag:].ravel()
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        out[lag - 1] = one @ other / norms if norms else 0.0
    return out


SHARE = 0.01
"""Of the values, those that are large."""


class StepPair(NamedTuple):
    """What a worker's gradients of two steps have in common, on average over the workers.

    Attributes:
      steps: the numbers of both.
      overlap: the share of places that the largest 1 % of both have in common.
      cosine: between the two gradients.
    """

    steps: tuple[int, int]
    overlap: float
    cosine: float


def agreement(rows: Array, steps: Array) -> tuple[float | None, float | None, float | None]:
    """Overlap, cosine and signal of rows [r, n] of workers; None where no step has two of them."""
    groups = [rows[steps == step] for step in np.unique(steps)]
    pairs = [(overlap(group), *_products(group)) for group in groups if len(group) > 1]
    if not pairs:
        return None, None, None
    shares, cosines, common, whole = zip(*pairs, strict=True)
    shared, total = max(0.0, sum(common)), sum(whole)
    own = total - shared
    # Equal gradients differ by rounding.
    return _mean(shares), _mean(cosines), shared / own if own > 1e-6 * total else None


def between_steps(rows: Array, of: tuple[tuple[int, int], ...]) -> tuple[StepPair, ...]:
    """Of the workers that are in two steps, one after the other."""
    place = {key: row for row, key in enumerate(of)}
    found: list[StepPair] = []
    for one, other in itertools.pairwise(sorted({step for step, _ in of})):
        workers = [w for step, w in of if step == one and (other, w) in place]
        both = [rows[[place[one, w], place[other, w]]] for w in workers]
        overlaps = _mean(overlap(two) for two in both)
        cosines = _mean(_products(two)[0] for two in both)
        if overlaps is not None and cosines is not None:
            found.append(StepPair((one, other), overlaps, cosines))
    return tuple(found)


def overlap(rows: Array) -> float:
    """The share of places that the largest values of two rows have in common, over all pairs."""
    count, n = rows.shape
    k = math.ceil(SHARE * n)
    hits = np.zeros(n, np.int64)
    for row in rows:
        magnitude = np.abs(row)
        support = np.argpartition(magnitude, n - k)[n - k :]
        hits[support[magnitude[support] > 0]] += 1
    total = int(np.sum(hits))
    both = int(np.sum(hits * (hits - 1)))  # each pair twice
    return both / ((count - 1) * total) if total else math.nan


def _products(rows: Array) -> tuple[float, float, float]:
    """The mean cosine of two rows, their mean product, and the mean of the squares."""
    wide = rows.astype(np.float64)
    gram = wide @ wide.T
    squares = np.diag(gram)
    pairs = ~np.eye(len(rows), dtype=bool)
    norms = np.sqrt(np.outer(squares, squares))
    known = pairs & (norms > 0)
    cosine = float(np.mean(gram[known] / norms[known])) if known.any() else math.nan
    return cosine, float(np.mean(gram[pairs])), float(np.mean(squares))


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else None
