"""Paths of trees, rows of vectors, and concatenated arrays.

If a whole vector is padded, XLA checks a bound for every value, and does not vectorize. So most
callers first process the values that fill whole rows, and pad only the rest (`whole_then_rest`).
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
"""An array or shape: it has a shape and a dtype."""


def spec(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def by_path(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Map the path of each leaf to the leaf, in the order of the leaves.

    A path such as "layers/0/w" joins keys, positions and fields by slashes. If two paths would be
    equal, as in {"a/b": x, "a": {"b": y}}, both have the form of JAX: "['a/b']".
    """
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    exact = [jax.tree_util.keystr(path) for path, _ in pairs]
    plain = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    times = Counter(plain + exact)
    names = [name if times[name] == 1 else own for name, own in zip(plain, exact, strict=True)]
    return {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True)}


Encode = Callable[..., tuple[jax.Array, ...]]


def whole_then_rest(encode: Encode, group: int, *vectors: jax.Array) -> tuple[jax.Array, ...]:
    """Encode the values that fill whole groups and the rest separately; concatenate the results."""
    size = vectors[0].size
    whole = size - size % group
    if whole in (0, size):
        return encode(*vectors)
    head, rest = encode(*(v[:whole] for v in vectors)), encode(*(v[whole:] for v in vectors))
    return tuple(jnp.concatenate(both) for both in zip(head, rest, strict=True))


def rows(vector: jax.Array, length: int) -> jax.Array:
    """Cut the vector into rows of `length`, and pad the last row with zeros."""
    missing = -vector.size % length
    if missing:
        vector = lax.pad(vector, vector.dtype.type(0), ((0, missing, 0),))
    return lax.reshape(vector, (vector.size // length, length))


FEW = 8
"""Fewer than FEW pieces have a kernel each."""


def cut(x: jax.Array, sizes: Sequence[int], axis: int = 0) -> list[jax.Array]:
    """Cut an array into consecutive pieces of these sizes along an axis >= 0.

    If XLA knows the start of each piece, it compiles a kernel for each piece and reader, which took
    three times as long for a hundred leaves. So this function hides the starts on CPUs.
    """
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    known = functools.partial(_at, starts, sizes, axis)
    if len(sizes) < FEW or not x.size or not jnp.issubdtype(x.dtype, jnp.number):
        return known(x)

    def hidden(x: jax.Array) -> list[jax.Array]:
        def places() -> list[jax.Array]:
            return [jnp.int32(start) for start in starts]

        # XLA cannot see the starts through a branch.
        return _at(lax.cond(x.ravel()[0] == 0, places, places), sizes, axis, x)

    @custom_vmap
    def batched(x: jax.Array) -> list[jax.Array]:
        # On other platforms, the host would wait for the device at the branch.
        return _platform.dependent(x, cpu=hidden, default=known)

    @batched.def_vmap
    def _(size: int, in_batched: list[bool], x: jax.Array) -> tuple[Any, Any]:
        del size, in_batched
        return cut(x, sizes, axis + 1), [True] * len(sizes)

    @jax.custom_jvp
    def pieces(x: jax.Array) -> list[jax.Array]:
        return batched(x)

    # A custom rule for `vmap` has no transpose.
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
    """Invert `jnp.stack`."""
    return [row.reshape(x.shape[1:]) for row in cut(x, [1] * x.shape[0])]


def as_one(leaves: Sequence[jax.Array]) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """Concatenate real and complex arrays into a float32 vector; return the inverse too."""
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
