"""What the gradients of several workers, and of several steps, have in common."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SHARE = 0.01
"""Of the values, those that are large."""


class Agreement(NamedTuple):
    """What workers have in common in one step; None where there is no second one."""

    overlap: float | None
    cosine: float | None
    signal: float | None


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


def agreement(rows: Array, steps: Array) -> Agreement:
    """Of rows [r, n], each of another worker or step: between those of one step."""
    groups = [rows[steps == step] for step in np.unique(steps)]
    groups = [group for group in groups if len(group) > 1]
    pairs = [(overlap(group), *_products(group)) for group in groups]
    if not pairs:
        return Agreement(None, None, None)
    shares, cosines, common, whole = (np.asarray(column) for column in zip(*pairs, strict=True))
    shared, total = max(0.0, float(np.sum(common))), float(np.sum(whole))
    own = total - shared
    # Equal gradients differ by rounding.
    signal = shared / own if own > 1e-6 * total else None
    return Agreement(_mean(shares), _mean(cosines), signal)


def between_steps(rows: Array, of: tuple[tuple[int, int], ...]) -> tuple[StepPair, ...]:
    """Of the workers that are in two steps, one after the other."""
    place = {key: row for row, key in enumerate(of)}
    steps = sorted({step for step, _ in of})
    found: list[StepPair] = []
    for pair in itertools.pairwise(steps):
        workers = [w for step, w in of if step == pair[0] and (pair[1], w) in place]
        both = [rows[[place[pair[0], w], place[pair[1], w]]] for w in workers]
        overlaps = _mean(np.asarray([overlap(two) for two in both]))
        cosines = _mean(np.asarray([_products(two)[0] for two in both]))
        if overlaps is not None and cosines is not None:
            found.append(StepPair(pair, overlaps, cosines))
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


def _mean(values: Array) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if known.size else None
