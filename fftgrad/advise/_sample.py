"""The values that are looked at: all, or whole blocks drawn from each stretch of the gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fftgrad._contracts import PyTree
from fftgrad.advise import _inputs
from fftgrad.advise._gradient_files import Array, GradientLog

BLOCK = 4096
"""So many neighbors are taken together, so that what ties them is seen."""

SEED = 0


class Piece(NamedTuple):
    """What is in the sample of a leaf, or of all leaves of less than a block."""

    name: str  # the path of the leaf, or how many leaves they are
    values: int  # how many values it has in one gradient
    columns: slice | Array  # the columns of the sample that are its own


class Sample(NamedTuple):
    """Values of the same positions in the gradient of each step and worker."""

    rows: Array  # the values, float32[r, n], in the order of the gradient
    of: tuple[tuple[int, int], ...]  # the step and the worker of each row
    # the leaves with a block of values or more, in order; then the smaller ones, as one
    pieces: tuple[Piece, ...]
    values: int  # how many values one gradient has
    unseen: tuple[str, ...]  # the larger leaves of which nothing is in the sample


def take(gradients: PyTree, max_values: int) -> Sample:
    """A sample of so many values, of all steps and workers together."""
    if max_values < BLOCK:
        raise ValueError(
            f"analyze(max_values): must be a block of {BLOCK} values at least, got {max_values}; "
            "use 4_194_304."
        )
    log = gradients if isinstance(gradients, GradientLog) else GradientLog({0: {0: gradients}})
    keys = [(step, worker) for step, workers in log.gradients.items() for worker in workers]
    places = [f"step {step}, worker {worker}" for step, worker in keys]
    leaves = _inputs.alike("analyze", dict(zip(places, log.trees, strict=True)))
    names, sizes = list(leaves[0]), [leaf.size for leaf in leaves[0].values()]
    spans = _spans(sizes, max_values // (len(keys) * BLOCK))
    rows = np.stack([_row(*one, spans) for one in zip(leaves, places, strict=True)])
    _inputs.check_values("analyze", rows)
    counts = [sum(stop - start for start, stop in own) for own in spans]
    ends = np.cumsum(counts)
    pieces = [
        Piece(name or "the array", size, slice(end - count, end))
        for name, size, count, end in zip(names, sizes, counts, ends, strict=True)
        if size >= BLOCK and count
    ]
    small = np.asarray(sizes) < BLOCK
    columns = np.flatnonzero(np.repeat(small, counts))
    if columns.size:
        name = f"small leaves ({np.sum(small)})"
        pieces.append(Piece(name, int(np.sum(sizes, where=small)), columns))
    unseen = [n for n, size, c in zip(names, sizes, counts, strict=True) if size >= BLOCK and not c]
    return Sample(rows, tuple(keys), tuple(pieces), sum(sizes), tuple(unseen))


def _spans(sizes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Where the blocks of each leaf are: all, or one at random of each of `most` stretches."""
    counts = [-(-size // BLOCK) for size in sizes]
    leaf = np.repeat(np.arange(len(sizes)), counts)
    block = np.concatenate([np.arange(count) for count in counts])
    chosen, most = np.arange(leaf.size), max(1, most)
    if leaf.size > most:
        edges = np.arange(most + 1) * leaf.size // most
        chosen = np.random.default_rng(SEED).integers(edges[:-1], edges[1:])
    spans: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for i, start in zip(leaf[chosen].tolist(), (block[chosen] * BLOCK).tolist(), strict=True):
        spans[i].append((start, min(start + BLOCK, sizes[i])))
    return spans


def _row(leaves: dict[str, Array], place: str, spans: Sequence[Sequence[tuple[int, int]]]) -> Array:
    """The chosen blocks of one gradient, as one vector."""
    parts: list[Array] = []
    for (name, leaf), own in zip(leaves.items(), spans, strict=True):
        for start, stop in own:
            with np.errstate(over="ignore"):  # which is then not finite
                parts.append(leaf.ravel()[start:stop].astype(np.float32))
            _inputs.check_finite("analyze", parts[-1], f" in {name or 'the array'} at {place}")
    return np.concatenate(parts)
