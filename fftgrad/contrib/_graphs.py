"""Who talks to whom where no collective is of all workers, and with which weight."""

import abc
import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fftgrad._values import value

Permutation = tuple[int, ...]
"""Whom each worker hears, by number."""


class Graph(abc.ABC):
    """Contract: which workers exchange with each other.

    Each of d neighbors is a permutation of the workers, heard at once, and with each its inverse is
    one, so that who hears is heard. A neighbor has the weight 1 / (d + 1), as the worker itself: W
    is symmetric and doubly stochastic, and gossip keeps the mean of all workers. A graph of one's
    own says its permutations:

        @dataclasses.dataclass(frozen=True)
        class Pairs(gossip.Graph):
            def neighbors(self, workers):
                return (tuple(i ^ 1 for i in range(workers)),)
    """

    @abc.abstractmethod
    def neighbors(self, workers: int) -> tuple[Permutation, ...]:
        """The neighbors of so many workers, without the worker itself: whom each hears."""

    def degree(self, workers: int) -> int:
        """How many neighbors a worker has: how often what it sends crosses its link."""
        return len(checked(self, workers))

    def weights(self, workers: int) -> npt.NDArray[np.float64]:
        """W, [workers, workers]; its row i says what worker i makes of what it hears."""
        found = checked(self, workers)
        out = np.eye(workers)
        for sources in found:
            out[np.arange(workers), list(sources)] += 1
        return out / (len(found) + 1)

    def spectral_gap(self, workers: int) -> float:
        """1 - |λ₂| of W: by what share a round of exact gossip shrinks a distance, at least."""
        ones = np.full((workers, workers), 1 / workers)
        return 1 - float(np.abs(np.linalg.eigvalsh(self.weights(workers) - ones)).max())

    def largest_gamma(self, workers: int) -> float:
        """1 / (1 - λ) for the smallest eigenvalue λ of W, at most 1: up to it no gossip overshoots.

        A round of it makes of each difference between workers a share, 1 - γ (1 - λ) of it or more;
        above it some come back with the other sign.
        """
        smallest = float(np.linalg.eigvalsh(self.weights(workers)).min())
        return 1 / (1 - min(round(smallest, 12), 0.0))


@dataclasses.dataclass(frozen=True)
class Ring(Graph):
    """Value: a graph; each worker hears the one before it and the one after it.

    All weights are 1/3; of two workers each hears one, with weight 1/2, and one hears nobody. The
    gap closes with the square of the workers: 8 have 0.20, 16 have 0.051, 64 have 0.0032.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> gossip.Ring().weights(4).round(2).tolist()[0], gossip.Ring().degree(2)
      ([0.33, 0.33, 0.0, 0.33], 1)
    """

    def neighbors(self, workers: int) -> tuple[Permutation, ...]:
        return _different(_shifts(workers, (1, -1)))


@value
class Torus(Graph):
    """Value: a graph; workers in a grid, each of which hears those beside, above and below.

    Worker i is in row i // columns and column i % columns, as devices of a mesh of these two axes
    are. Rows and columns are rings, and all weights are equal: 1/5, more where a ring has but one
    or two workers.

    Args:
      rows: how many rows, at least 1.
      columns: how many columns, at least 1.

    Raises:
      ValueError: if a side is not positive; while tracing, if the axis has not rows · columns
        workers.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> gossip.Torus(4, 4).degree(16), round(gossip.Torus(4, 4).spectral_gap(16), 3)
      (4, 0.4)
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1:
            raise ValueError(
                f"Torus(rows, columns): must be at least 1, got {self.rows} and {self.columns}; "
                "use two numbers whose product is the number of workers."
            )

    def neighbors(self, workers: int) -> tuple[Permutation, ...]:
        if self.rows * self.columns != workers:
            raise ValueError(
                f"Torus(rows, columns): must have as many places as the axis has workers, got "
                f"{self.rows} x {self.columns} for {workers}; use Ring(), or other sides."
            )
        grid = np.arange(workers).reshape(self.rows, self.columns)
        moves = [(axis, by) for axis in (0, 1) for by in (1, -1)]
        return _different(tuple(np.roll(grid, by, axis).ravel().tolist()) for axis, by in moves)


@dataclasses.dataclass(frozen=True)
class Exponential(Graph):
    """Value: a graph; each worker hears those at distances 1, 2, 4 ... on either side.

    It is the static exponential graph, made symmetric: in every step all of about 2 log₂ w
    neighbors are heard, with equal weights. 8 workers have 5 neighbors and a gap of 0.67, 16 have 7
    and 0.5, 64 have 11 and 0.33.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> gossip.Exponential().degree(8), round(gossip.Exponential().spectral_gap(8), 2)
      (5, 0.67)

    References:
      Ying et al., NeurIPS 2021, arXiv:2110.13363, whose graph hears one side only.
    """

    def neighbors(self, workers: int) -> tuple[Permutation, ...]:
        distances = [2**j for j in range(workers.bit_length()) if 2**j < workers]
        return _different(_shifts(workers, [by for far in distances for by in (far, -far)]))


def checked(graph: Graph, workers: int) -> tuple[Permutation, ...]:
    """The neighbors, once W is known to be symmetric and doubly stochastic."""
    found = tuple(tuple(sources) for sources in graph.neighbors(workers))
    inverses = collections.Counter(tuple(np.argsort(sources).tolist()) for sources in found)
    rule = None
    if any(sorted(sources) != list(range(workers)) for sources in found):
        rule = f"must be permutations of {workers} workers"
    elif inverses != collections.Counter(found):
        rule = "must have the inverse of each permutation among them, as often"
    if rule:
        raise ValueError(f"{graph!r}.neighbors({workers}): {rule}, got {found}; use Ring().")
    return found


def _shifts(workers: int, distances: Iterable[int]) -> Iterable[Permutation]:
    """Whom each worker hears, for each distance on the ring."""
    return (tuple((i + by) % workers for i in range(workers)) for by in distances)


def _different(permutations: Iterable[Permutation]) -> tuple[Permutation, ...]:
    """The permutations that differ, and that move anyone."""
    # Of two workers on a ring the one before is the one after.
    return tuple(p for p in dict.fromkeys(permutations) if p != tuple(range(len(p))))
