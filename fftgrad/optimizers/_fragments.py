"""Fragments of a tree: equal shares of the rows of each leaf.

Rows are counted along the first axis that is at least as long as the number of fragments, or else
along the longest axis. (Axis 0 of a convolution kernel often has length three.) All fragments have
equal shapes, so one program without branches handles every fragment, and its number may be traced.
If the number of fragments does not divide the number of rows, the last fragments overlap earlier
ones, and `take` sets the shared rows to zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import PyTree


def take(tree: PyTree, number: jax.Array, fragments: int) -> PyTree:
    """Return fragment `number`, with zeros in rows that belong to earlier fragments."""
    if fragments == 1:
        return tree

    def one(leaf: jax.Array) -> jax.Array:
        if not leaf.ndim:
            return jnp.where(number == 0, leaf, 0)
        place = _place(leaf.shape, number, fragments)
        rows = place.rows_of(leaf)
        return rows if place.own is None else jnp.where(place.own, rows, 0)

    return jax.tree.map(one, tree)


def put(
    tree: PyTree, part: PyTree, number: jax.Array, fragments: int, due: jax.Array | bool
) -> PyTree:
    """Replace fragment `number` of a tree if `due`, else return the tree."""
    if fragments == 1 and due is True:
        return part

    def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if fragments == 1:
            return jnp.where(due, new, leaf)
        if not leaf.ndim:
            return jnp.where(due & (number == 0), new, leaf)
        place = _place(leaf.shape, number, fragments)
        wanted = due if place.own is None else place.own & due
        if wanted is not True:
            new = jnp.where(wanted, new, place.rows_of(leaf))
        return lax.dynamic_update_slice(leaf, new, place.start, allow_negative_indices=False)

    return jax.tree.map(one, tree, part)


def select(states: Sequence[PyTree], number: jax.Array) -> PyTree:
    def one(out: jax.Array, *others: jax.Array) -> jax.Array:
        for i, other in enumerate(others, 1):
            out = jnp.where(number == i, other, out)
        return out

    return jax.tree.map(one, *states)


def replace(
    states: Sequence[PyTree], new: PyTree, number: jax.Array, due: jax.Array | bool
) -> tuple[PyTree, ...]:
    if len(states) == 1 and due is True:
        return (new,)

    def one(i: int, old: PyTree) -> PyTree:
        wanted = due if len(states) == 1 else due & (number == i)
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, old)

    return tuple(one(i, old) for i, old in enumerate(states))


class Place(NamedTuple):
    start: tuple[jax.Array, ...]
    sizes: tuple[int, ...]
    # Mask of the rows that belong to this fragment, not to an earlier one; None if all rows do.
    own: jax.Array | None

    def rows_of(self, leaf: jax.Array) -> jax.Array:
        return lax.dynamic_slice(leaf, self.start, self.sizes, allow_negative_indices=False)


def _place(shape: Sequence[int], number: jax.Array, fragments: int) -> Place:
    enough = (axis for axis, rows in enumerate(shape) if rows >= fragments)
    axis = next(enough, max(range(len(shape)), key=lambda axis: shape[axis]))
    rows = shape[axis]
    each = -(-rows // fragments)
    wanted = number * each
    first = jnp.minimum(wanted, rows - each)
    start = tuple(first if i == axis else jnp.zeros_like(first) for i in range(len(shape)))
    sizes = tuple(each if i == axis else size for i, size in enumerate(shape))
    if rows % fragments == 0:
        return Place(start, sizes, None)
    own = first + jnp.arange(each) >= wanted
    return Place(start, sizes, jnp.expand_dims(own, [i for i in range(len(shape)) if i != axis]))
