"""A tree in fragments of equal size: the same share of the rows of each leaf.

Rows are those of the first axis that has one for each fragment, else of the longest, because the
first axes of a convolution's kernel have three.
Which fragment it is may be known on the device alone, so that one program does for all of them,
without a branch: their shapes are equal. Where the number of fragments does not divide the rows,
the last ones begin with rows that belong to those before, and these are masked.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import PyTree
from fftgrad._values import check_count


def fragment(params: PyTree, fragments: int) -> PyTree:
    """Function: the shapes of what is exchanged at a time when parameters meet in fragments.

    Args:
      params: the parameters, or their shapes.
      fragments: in how many they meet, as for `diloco`.

    Returns:
      A tree like it, of `jax.ShapeDtypeStruct`, with `ceil(rows / fragments)` rows of each leaf,
      along its first axis that has so many, or else its longest. A leaf that has not so many along
      any axis travels one row at a time, in some of the meetings twice: take fewer fragments where
      most leaves are such.

    Raises:
      ValueError: if `fragments` is not positive.

    Example:
      >>> part = fg.optimizers.fragment({"w": jnp.zeros((100, 8)), "b": jnp.zeros(8)}, 10)
      >>> part["w"].shape, fg.wire_bytes(fg.AllReduce(), part)
      ((10, 8), 324)
    """
    check_count("fragment(fragments)", fragments, "use 10.")
    return jax.eval_shape(lambda tree: take(tree, jnp.int32(0), fragments), params)


def take(tree: PyTree, number: jax.Array, fragments: int) -> PyTree:
    """Fragment `number` of so many, with zeros in place of what belongs to those before."""
    if fragments == 1:
        return tree

    def one(leaf: jax.Array) -> jax.Array:
        if not leaf.ndim:
            return jnp.where(number == 0, leaf, 0)
        axis = _axis(leaf.shape, fragments)
        start, own = _where(leaf.shape[axis], number, fragments)
        rows = lax.dynamic_slice_in_dim(leaf, start, own.size, axis)
        return jnp.where(_over(own, leaf.ndim, axis), rows, 0)

    return jax.tree.map(one, tree)


def put(tree: PyTree, part: PyTree, number: jax.Array, fragments: int, due: jax.Array) -> PyTree:
    """The tree with another fragment `number`, if that is due; else as it was."""

    def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if fragments == 1:
            return jnp.where(due, new, leaf)
        if not leaf.ndim:
            return jnp.where(due & (number == 0), new, leaf)
        axis = _axis(leaf.shape, fragments)
        start, own = _where(leaf.shape[axis], number, fragments)
        wanted = _over(own & due, leaf.ndim, axis)
        rows = lax.dynamic_slice_in_dim(leaf, start, own.size, axis)
        return lax.dynamic_update_slice_in_dim(leaf, jnp.where(wanted, new, rows), start, axis)

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


def _axis(shape: Sequence[int], fragments: int) -> int:
    """The axis whose rows are dealt out."""
    enough = (axis for axis, rows in enumerate(shape) if rows >= fragments)
    return next(enough, max(range(len(shape)), key=lambda axis: shape[axis]))


def _where(rows: int, number: jax.Array, fragments: int) -> tuple[jax.Array, jax.Array]:
    """The first row of a slice, and which of its rows are the fragment's own, bool[rows]."""
    each = -(-rows // fragments)
    wanted = number * each
    start = jnp.minimum(wanted, rows - each)
    return start, start + jnp.arange(each) >= wanted


def _over(own: jax.Array, ndim: int, axis: int) -> jax.Array:
    """What holds for each row, for each value of it."""
    return jnp.expand_dims(own, [other for other in range(ndim) if other != axis])


def _select(number: jax.Array, cases: Sequence[jax.Array]) -> jax.Array:
    out = cases[0]
    for i, case in enumerate(cases[1:], 1):
        out = jnp.where(number == i, case, out)
    return out
