"""Shapes: trees and their paths, a vector in rows, several arrays as one and back.

Padding a whole vector costs a bound check at every value, which keeps the pass over it from being
vectorized. So most callers treat the values that fill whole rows first, and pad only the rest.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fftgrad.ops import _platform

PyTree: TypeAlias = Any
"""A nest of containers with arrays (or shapes) at its leaves."""

Like: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""Anything that has a shape and a dtype."""


def spec(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def by_path(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Map the path of each leaf to the leaf, in the order of the leaves.

    A path is "layers/0/w", with the keys, positions and fields on the way between slashes. Leaves
    with the same text, as those of {"a/b": x, "a": {"b": y}}, have the form of JAX: "['a/b']".
    """
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    exact = [jax.tree_util.keystr(path) for path, _ in pairs]
    plain = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    times = Counter(plain + exact)
    names = [name if times[name] == 1 else own for name, own in zip(plain, exact, strict=True)]
    return {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True)}


Encode = Callable[..., tuple[jax.Array, ...]]


def whole_then_rest(encode: Encode, group: int, *vectors: jax.Array) -> tuple[jax.Array, ...]:
    """`encode(*vectors)`, run once on the values that fill whole groups and once on the rest.

    The results are joined end to end.
    """
    size = vectors[0].size
    whole = size - size % group
    if whole in (0, size):
        return encode(*vectors)
    head, rest = encode(*(v[:whole] for v in vectors)), encode(*(v[whole:] for v in vectors))
    return tuple(jnp.concatenate(both) for both in zip(head, rest, strict=True))


def rows(vector: jax.Array, length: int) -> jax.Array:
    """The vector in rows of that length, the last one filled with zeros."""
    missing = -vector.size % length
    if missing:
        vector = lax.pad(vector, vector.dtype.type(0), ((0, missing, 0),))
    return lax.reshape(vector, (vector.size // length, length))


FEW = 8
"""Pieces of which so many may have a kernel each."""


def cut(x: jax.Array, sizes: Sequence[int], axis: int = 0) -> list[jax.Array]:
    """Consecutive pieces of an array, of these sizes along the axis, which is counted from 0.

    XLA makes one kernel for all readers of pieces that are equal, but not where each piece is at a
    place of its own that the compiler knows. Compiling a hundred leaves took three times as long.
    """
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    known = functools.partial(_at, starts, sizes, axis)
    if len(sizes) < FEW or not x.size or not jnp.issubdtype(x.dtype, jnp.number):
        return known(x)

    def hidden(x: jax.Array) -> list[jax.Array]:
        def places() -> list[jax.Array]:
            return [jnp.int32(start) for start in starts]

        # What a branch returns may be anything, for all that the compiler looks at.
        return _at(lax.cond(x.ravel()[0] == 0, places, places), sizes, axis, x)

    @custom_vmap
    def batched(x: jax.Array) -> list[jax.Array]:
        # Elsewhere a branch would wait for the device.
        return _platform.dependent(x, cpu=hidden, default=known)

    @batched.def_vmap
    def _(size: int, in_batched: list[bool], x: jax.Array) -> tuple[Any, Any]:
        del size, in_batched
        return cut(x, sizes, axis + 1), [True] * len(sizes)

    @jax.custom_jvp
    def pieces(x: jax.Array) -> list[jax.Array]:
        return batched(x)

    # A rule for `vmap` alone has no transpose.
    pieces.defjvp(lambda primals, tangents: (pieces(*primals), known(*tangents)))
    return pieces(x)


def _at(starts: Sequence[Any], sizes: Sequence[int], axis: int, x: jax.Array) -> list[jax.Array]:
    def one(start: Any, size: int) -> jax.Array:
        if isinstance(start, int):
            return lax.slice_in_dim(x, start, start + size, axis=axis)
        place, shape = [jnp.int32(0)] * x.ndim, list(x.shape)
        place[axis], shape[axis] = start, size
        return lax.dynamic_slice(x, place, shape, allow_negative_indices=False)

    return [one(start, size) for start, size in zip(starts, sizes, strict=True)]


def unstack(x: jax.Array) -> list[jax.Array]:
    """What `jnp.stack` made one array of."""
    return [row.reshape(x.shape[1:]) for row in cut(x, [1] * x.shape[0])]


def as_one(
    leaves: Sequence[jax.Array],
) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """Real and complex arrays as one float32 vector, and the inverse."""
    shapes = [(leaf.shape, jnp.issubdtype(leaf.dtype, jnp.complexfloating)) for leaf in leaves]
    flat = [
        jnp.stack([leaf.real, leaf.imag]).ravel() if is_complex else leaf.ravel()
        for leaf, (_, is_complex) in zip(leaves, shapes, strict=True)
    ]
    whole = jnp.concatenate(flat) if flat else jnp.zeros((0,), jnp.float32)

    def restore(vector: jax.Array) -> list[jax.Array]:
        out: list[jax.Array] = []
        pieces = cut(vector, [part.size for part in flat])
        for piece, (shape, is_complex) in zip(pieces, shapes, strict=True):
            if is_complex:
                piece = lax.complex(*jnp.split(piece, 2))
            out.append(piece.reshape(shape))
        return out

    return whole, restore
