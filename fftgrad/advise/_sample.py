"""The values that are looked at: all, or whole blocks drawn from each stretch of the gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from fftgrad._contracts import PyTree
from fftgrad.advise._gradient_files import named_leaves
from fftgrad.advise._gradient_log import GradientLog

Array = npt.NDArray[Any]

BLOCK = 4096
"""So many neighbors are taken together, so that what ties them is seen."""

SEED = 0


class Piece(NamedTuple):
    """What is in the sample of a leaf, or of all leaves of less than a block.

    Attributes:
      name: the path of the leaf, or how many leaves they are.
      values: how many values it has in one gradient.
      columns: the columns of the sample that are its own.
    """

    name: str
    values: int
    columns: slice | Array


class Sample(NamedTuple):
    """Values of the same positions in the gradient of each step and worker.

    Attributes:
      rows: the values, float32[r, n], in the order of the gradient.
      of: the step and the worker of each row.
      pieces: the leaves with a block of values or more, in order; then the smaller ones, as one.
      values: how many values one gradient has.
      unseen: the larger leaves of which nothing is in the sample.
    """

    rows: Array
    of: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    values: int
    unseen: tuple[str, ...]


def take(gradients: PyTree, max_values: int) -> Sample:
    """A sample of so many values, of all steps and workers together."""
    if max_values < BLOCK:
        raise ValueError(
            f"analyze(max_values): must be a block of {BLOCK} values at least, got {max_values}; "
            "use 4_194_304."
        )
    log = gradients if isinstance(gradients, GradientLog) else GradientLog({0: {0: gradients}})
    trees = {(s, w): tree for s, workers in log.gradients.items() for w, tree in workers.items()}
    if not trees:
        raise ValueError(
            "analyze(gradients): must hold a gradient, got none; wait until a step of "
            "record_gradients(steps) has passed."
        )
    leaves = {key: _leaves(tree, key) for key, tree in trees.items()}
    names = list(next(iter(leaves.values())))
    sizes = [leaf.size for leaf in next(iter(leaves.values())).values()]
    _check_alike(leaves)
    if not sum(sizes):
        raise ValueError(
            "analyze(gradients): must have a value at least, got none; pass the gradients of "
            "fg.advise.recorded(opt_state), or a tree of arrays."
        )
    spans = _spans(sizes, max_values // (len(trees) * BLOCK))
    rows = np.stack([_row(own, spans, key) for key, own in leaves.items()])
    if not rows.any():
        raise ValueError(
            "analyze(gradients): must not be all zero, got only zeros; pass those of other steps."
        )
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
    return Sample(rows, tuple(trees), tuple(pieces), sum(sizes), tuple(unseen))


def _leaves(tree: PyTree, key: tuple[int, int]) -> dict[str, Array]:
    """The leaves of a tree, by their paths."""
    named = named_leaves(tree)
    if any(isinstance(leaf, Tracer) for _, leaf in named):
        raise TypeError(
            "analyze(gradients): must be concrete arrays, got a traced one; call it outside of "
            "jax.jit, on what fg.advise.recorded returns."
        )
    leaves = {name: np.asarray(leaf) for name, leaf in named}
    for name, leaf in leaves.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"analyze(gradients): must be arrays of floating-point numbers, got {leaf.dtype} "
                f"for {name or 'the array'} at {_say(key)}; leave it out."
            )
    return leaves


def _check_alike(leaves: dict[tuple[int, int], dict[str, Array]]) -> None:
    """Refuses gradients of other leaves than the first one's."""
    shapes = {key: [(n, leaf.shape) for n, leaf in own.items()] for key, own in leaves.items()}
    first = next(iter(shapes))
    for key, own in shapes.items():
        if own != shapes[first]:
            raise ValueError(
                f"analyze(gradients): must be trees of one structure, got another at {_say(key)} "
                f"than at {_say(first)}; pass gradients of one model."
            )


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


def _row(
    leaves: dict[str, Array], spans: Sequence[Sequence[tuple[int, int]]], key: tuple[int, int]
) -> Array:
    """The chosen blocks of one gradient, as one vector."""
    parts: list[Array] = []
    for (name, leaf), own in zip(leaves.items(), spans, strict=True):
        parts += [leaf.ravel()[start:stop].astype(np.float32) for start, stop in own]
        bad = sum(int(np.sum(~np.isfinite(part))) for part in parts[len(parts) - len(own) :])
        if bad:
            raise ValueError(
                f"analyze(gradients): must be finite, got {name or 'an array'} with {bad} values "
                f"that are not, at {_say(key)}; leave that step out."
            )
    return np.concatenate(parts)


def _say(key: tuple[int, int]) -> str:
    return f"step {key[0]}, worker {key[1]}"
