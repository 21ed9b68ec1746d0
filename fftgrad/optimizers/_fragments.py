"""A tree in fragments of equal size: the same share of the rows of each leaf.

Which fragment it is may be known on the device alone, so that one program does for all of them,
without a branch: their shapes are equal. Where the number of fragments does not divide the rows,
the last ones begin with rows that belong to those before, and these are masked.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import PyTree


def fragment(params: PyTree, fragments: int) -> PyTree:
    """Function: the shapes of what is exchanged at a time when parameters meet in fragments.

    Args:
      params: the parameters, or their shapes.
      fragments: in how many they meet, as for `diloco`.

    Returns:
      A tree like it, of `jax.ShapeDtypeStruct`, with `ceil(rows / fragments)` rows of each leaf.

    Raises:
      ValueError: if `fragments` is not positive.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> part = fg.fragment({"w": jnp.zeros((100, 8)), "b": jnp.zeros(8)}, 10)
      >>> part["w"].shape, fg.wire_bytes(fg.AllReduce(), part)
      ((10, 8), 324)
    """
    if fragments < 1:
        raise ValueError(f"fragment(fragments): must be at least 1, got {fragments}; use 10.")
    return jax.eval_shape(lambda tree: take(tree, jnp.int32(0), fragments), params)


def take(tree: PyTree, number: jax.Array, fragments: int) -> PyTree:
    """Fragment `number` of so many, with zeros in place of what belongs to those before."""
    if fragments == 1:
        return tree

    def one(leaf: jax.Array) -> jax.Array:
        start, own = _where(leaf, number, fragments)
        rows = lax.dynamic_slice_in_dim(leaf, start, own.size) if leaf.ndim else leaf
        return jnp.where(_over(own, leaf), rows, 0)

    return jax.tree.map(one, tree)


def put(tree: PyTree, part: PyTree, number: jax.Array, fragments: int, due: jax.Array) -> PyTree:
    """The tree with another fragment `number`, if that is due; else as it was."""

    def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if fragments == 1:
            return jnp.where(due, new, leaf)
        start, own = _where(leaf, number, fragments)
        wanted = _over(own & due, leaf)
        if not leaf.ndim:
            return jnp.where(wanted, new, leaf)
        rows = lax.dynamic_slice_in_dim(leaf, start, own.size)
        return lax.dynamic_update_slice_in_dim(leaf, jnp.where(wanted, new, rows), start, 0)

    return jax.tree.map(one, tree, part)


def select(states: Sequence[PyTree], number: jax.Array) -> PyTree:
    """The state of fragment `number`."""
    if len(states) == 1:
        return states[0]
    return jax.tree.map(lambda *each: _select(number, each), *states)


def replace(
    states: Sequence[PyTree], new: PyTree, number: jax.Array, due: jax.Array
) -> tuple[PyTree, ...]:
    """The states, with another one of fragment `number` if that is due."""

    def one(i: int, old: PyTree) -> PyTree:
        wanted = due if len(states) == 1 else due & (number == i)
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, old)

    return tuple(one(i, old) for i, old in enumerate(states))


def _where(leaf: Any, number: jax.Array, fragments: int) -> tuple[jax.Array, jax.Array]:
    """The first row of a slice, and which of its rows are the fragment's own, bool[rows]."""
    rows = leaf.shape[0] if leaf.ndim else 1
    each = -(-rows // fragments)
    wanted = number * each
    start = jnp.minimum(wanted, rows - each)
    return start, start + jnp.arange(each) >= wanted


def _over(own: jax.Array, leaf: jax.Array) -> jax.Array:
    """What holds for each row, for each value of it."""
    return own.reshape(-1, *(1,) * (leaf.ndim - 1)) if leaf.ndim else own.reshape(())


def _select(number: jax.Array, cases: Sequence[jax.Array]) -> jax.Array:
    out = cases[0]
    for i, case in enumerate(cases[1:], 1):
        out = jnp.where(number == i, case, out)
    return out
