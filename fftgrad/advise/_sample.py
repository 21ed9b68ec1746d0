"""The values that are looked at: all, or whole blocks drawn from each stretch of the gradient."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
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
    """What is in the sample of a leaf, or of all small leaves.

    Attributes:
      name: the path of the leaf.
      values: how many values it has in one gradient.
      columns: the columns of the sample that are its own.
    """

    name: str
    values: int
    columns: slice


class Sample(NamedTuple):
    """Values of the same positions in the gradient of each step and worker.

    Attributes:
      rows: the values, float32[r, n], in the order of the gradient.
      of: the step and the worker of each row.
      pieces: the leaves with `BLOCK` values or more, in order.
      pooled: the columns of the smaller ones, and how many leaves and values these are.
      values: how many values one gradient has.
      unseen: the larger leaves of which nothing is in the sample.
    """

    rows: Array
    of: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    pooled: tuple[Array, int, int]
    values: int
    unseen: tuple[str, ...]


def take(gradients: PyTree, max_values: int) -> Sample:
    """A sample of so many values, of all steps and workers together."""
    if max_values < BLOCK:
        raise ValueError(
            f"analyze(max_values): must be a block of {BLOCK} values at least, got {max_values}; "
            "use 4_194_304."
        )
    trees = _trees(gradients)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(list(trees.values()))):
        raise TypeError(
            "analyze(gradients): must be concrete arrays, got a traced one; call it outside of "
            "jax.jit, on what fg.advise.recorded returns."
        )
    leaves = {key: named_leaves(tree) for key, tree in trees.items()}
    like = _like(leaves)
    values = sum(size for _, size in like)
    if not values:
        raise ValueError(
            "analyze(gradients): must have a value at least, got none; pass the gradients of "
            "fg.advise.recorded(opt_state), or a tree of arrays."
        )
    chosen = [list(blocks) for blocks in _chosen(like, max_values // (len(trees) * BLOCK))]
    rows = np.stack([_row(leaves[key], chosen, key) for key in trees])
    if not rows.any():
        raise ValueError(
            "analyze(gradients): must not be all zero, got only zeros; pass those of other steps."
        )
    pieces: list[Piece] = []
    unseen: list[str] = []
    small: list[Array] = []
    start = 0
    for (name, size), blocks in zip(like, chosen, strict=True):
        stop = start + sum(min(size, (b + 1) * BLOCK) - b * BLOCK for b in blocks)
        if size < BLOCK:
            small.append(np.arange(start, stop))
        elif blocks:
            pieces.append(Piece(name, size, slice(start, stop)))
        else:
            unseen.append(name)
        start = stop
    sizes = [size for _, size in like if size < BLOCK]
    pooled = np.concatenate([np.zeros(0, np.int64), *small]), len(sizes), sum(sizes)
    return Sample(rows, tuple(trees), tuple(pieces), pooled, values, tuple(unseen))


def _trees(gradients: PyTree) -> Mapping[tuple[int, int], PyTree]:
    """The gradients by step and worker; a plain tree is that of one worker and step."""
    if not isinstance(gradients, GradientLog):
        return {(0, 0): gradients}
    found = {
        (step, worker): tree
        for step, workers in gradients.gradients.items()
        for worker, tree in workers.items()
    }
    if not found:
        raise ValueError(
            "analyze(gradients): must hold a gradient, got none; wait until a step of "
            "record_gradients(steps) has passed."
        )
    return found


def _like(leaves: Mapping[tuple[int, int], list[tuple[str, Array]]]) -> list[tuple[str, int]]:
    """The name and size of each leaf, which all gradients must share."""
    shapes = {key: [(n, leaf.shape) for n, leaf in named] for key, named in leaves.items()}
    first = next(iter(shapes))
    for key, own in shapes.items():
        if own != shapes[first]:
            raise ValueError(
                f"analyze(gradients): must be trees of one structure, got another at {_say(key)} "
                f"than at {_say(first)}; pass gradients of one model."
            )
    for key, named in leaves.items():
        for name, leaf in named:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"analyze(gradients): must be arrays of floating-point numbers, got "
                    f"{leaf.dtype} for {name or 'the array'} at {_say(key)}; leave it out."
                )
    return [(name, leaf.size) for name, leaf in leaves[first]]


def _chosen(like: list[tuple[str, int]], most: int) -> Iterator[list[int]]:
    """The blocks of each leaf: all, or one at random of each of `most` equal stretches."""
    counts = [-(-size // BLOCK) for _, size in like]
    ends = np.cumsum(counts)
    total, most = int(ends[-1]), max(1, most)
    blocks = np.arange(total)
    if total > most:
        edges = np.arange(most + 1) * total // most
        blocks = np.random.default_rng(SEED).integers(edges[:-1], edges[1:])
    for end, count in zip(ends, counts, strict=True):
        yield (blocks[(blocks >= end - count) & (blocks < end)] - (end - count)).tolist()


def _row(named: list[tuple[str, Array]], chosen: list[list[int]], key: tuple[int, int]) -> Array:
    """The chosen blocks of one gradient, as one vector."""
    parts = [np.zeros(0, np.float32)]
    for (name, leaf), blocks in zip(named, chosen, strict=True):
        flat = leaf.ravel()
        for block in blocks:
            part = flat[block * BLOCK : (block + 1) * BLOCK].astype(np.float32)
            bad = int(np.sum(~np.isfinite(part)))
            if bad:
                raise ValueError(
                    f"analyze(gradients): must be finite, got {name or 'an array'} with {bad} "
                    f"values in a block that are not, at {_say(key)}; leave that step out."
                )
            parts.append(part)
    return np.concatenate(parts)


def _say(key: tuple[int, int]) -> str:
    return f"step {key[0]}, worker {key[1]}"
