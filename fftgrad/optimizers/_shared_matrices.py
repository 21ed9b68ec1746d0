"""Muon's orthogonal matrices, of which each worker makes its share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.contrib import MuonDimensionNumbers

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree

# Without an average, optax's Muon is its Newton-Schulz iteration.
ITERATION = optax.contrib.scale_by_muon(
    beta=0.0, nesterov=False, weight_dimension_numbers=MuonDimensionNumbers(1, 2)
)


def orthogonal(updates: PyTree, numbers: Any, rms: float, axis_name: AxisName) -> PyTree:
    """Make the matrices of a tree orthogonal: each worker its share, sent in bfloat16.

    Matrices of one shape, or of its transpose, are a stack, of which each worker has an equal part,
    so a worker saves time if there are as many of a shape as workers. Other leaves stay as they
    were. `numbers` and `rms` are optax's `muon_weight_dimension_numbers` and `consistent_rms`.
    """
    leaves, structure = jax.tree.flatten(updates)
    workers, stacks = _axes.size(axis_name, "feedback_muon"), {}
    for place, own in enumerate(_of_leaves(numbers, updates)):
        if own is not None:
            flat = _Flat(leaves[place], own)
            stacks.setdefault(flat.short_long, []).append((place, flat))
    shares = []
    for members in stacks.values():
        stack = jnp.concatenate([flat.matrices for _, flat in members])
        count = -(-len(stack) // workers)
        stack = jnp.pad(stack, ((0, count * workers - len(stack)), (0, 0), (0, 0)))
        mine = lax.dynamic_slice_in_dim(stack, _axes.index(axis_name) * count, count)
        made: Any = ITERATION.update(mine, ITERATION.init(mine))[0]
        shares.append(made.astype(jnp.bfloat16))
    if not shares:
        return updates
    # as bits, because XLA widens a collective of bfloat16 on some backends
    sent = jnp.concatenate([share.ravel() for share in shares])
    rows = _axes.all_gather(lax.bitcast_convert_type(sent, jnp.uint16), axis_name)
    rows, start = lax.bitcast_convert_type(rows, jnp.bfloat16), 0
    for members, share in zip(stacks.values(), shares, strict=True):
        own = rows[:, start : start + share.size].reshape(-1, *share.shape[1:])
        start += share.size
        for place, flat in members:
            count = len(flat.matrices)
            leaves[place], own = flat.back(own[:count], rms), own[count:]
    return jax.tree.unflatten(structure, leaves)


class _Flat:
    """A leaf as a stack of matrices that are not taller than wide."""

    def __init__(self, leaf: jax.Array, numbers: MuonDimensionNumbers) -> None:
        rows, columns = (
            tuple(a % leaf.ndim for a in ((axes,) if isinstance(axes, int) else axes))
            for axes in numbers
        )
        batch = tuple(a for a in range(leaf.ndim) if a not in rows + columns)
        size = lambda axes: math.prod(leaf.shape[a] for a in axes)  # noqa: E731
        if size(rows) > size(columns):
            rows, columns = columns, rows
        self.order = batch + rows + columns
        self.like = leaf
        self.short_long = (size(rows), size(columns))
        self.matrices = leaf.transpose(self.order).reshape(-1, *self.short_long)

    def back(self, matrices: jax.Array, rms: float) -> jax.Array:
        """Give them the shape and the dtype of the leaf, and the length of a step."""
        scaled = matrices.astype(self.like.dtype) * (rms * self.short_long[1] ** 0.5)
        moved = scaled.reshape([self.like.shape[a] for a in self.order])
        return moved.transpose(sorted(range(self.like.ndim), key=self.order.__getitem__))


def _of_leaves(numbers: Any, updates: PyTree) -> list[MuonDimensionNumbers | None]:
    """One for each leaf; None for leaves that are no matrices."""
    if numbers is None:
        return [MuonDimensionNumbers() if u.ndim == 2 else None for u in jax.tree.leaves(updates)]
    numbers = numbers(updates) if callable(numbers) else numbers
    is_leaf = lambda n: n is None or isinstance(n, MuonDimensionNumbers)  # noqa: E731
    spread = lambda n, part: [n] * len(jax.tree.leaves(part))  # noqa: E731
    lists = jax.tree.map(spread, numbers, updates, is_leaf=is_leaf)
    return [n for own in jax.tree.leaves(lists, is_leaf=lambda n: isinstance(n, list)) for n in own]
