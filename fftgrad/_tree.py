"""Pytree <-> the float32 parts that are compressed each on its own."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from fftgrad._base import Like, PyTree

Scope: TypeAlias = Literal["model", "leaf"] | Callable[[str, Like], str]
"""Which leaves form a part: all, each, or those to which a function gives the same name."""

Bucket: TypeAlias = dict[str, Any]
"""Parts by name, which travel together."""

BUCKET_LIMIT = 2**30
"""Most values in a bucket: positions are int32, and a transform of it is 4 GiB, cuFFT's limit."""


_CUT = "#"


def check_leaf(owner: str, name: str, leaf: Any) -> None:
    """Refuses what cannot be cast to float32 without loss."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        raise TypeError(
            f"{owner}({name}): must be a float32, bfloat16 or float16 array, got "
            f"{type(leaf).__name__ if dtype is None else dtype}; cast it, or keep it out of the "
            "exchange with optax.partition."
        )


def check_scope(owner: str, scope: Any) -> None:
    """Refuses what does not say how leaves form parts."""
    if scope not in ("model", "leaf") and not callable(scope):
        raise ValueError(
            f"{owner}(scope): must be 'model', 'leaf' or a function from a leaf's path and shape "
            f"to the name of its group, got {scope!r}; use 'model' to choose over all leaves."
        )


def buckets(tree: PyTree, scope: Scope = "model", limit: int = BUCKET_LIMIT) -> list[Bucket]:
    """The shapes of what `ravel` makes of a tree of this shape."""
    return jax.eval_shape(lambda tree: ravel(tree, scope, limit), like(tree))


def ravel(tree: PyTree, scope: Scope = "model", limit: int = BUCKET_LIMIT) -> list[Bucket]:
    """The parts of a tree, in float32, in as many buckets as the limit of each one's size needs.

    A part is a group of leaves, one after the other; a single leaf keeps its shape. What is longer
    than the limit is cut into pieces of equal length, but for the last.
    """
    out: list[Bucket] = []
    room = 0
    for name, leaves in _groups(tree, scope).items():
        for piece_name, piece in _pieces(name, leaves, limit).items():
            if piece.size > room:
                out.append({})
                room = limit
            out[-1][piece_name] = piece
            room -= piece.size
    return out


def unravel(parts: list[Bucket], like: PyTree, scope: Scope = "model") -> PyTree:
    """The tree, of float32 leaves, that `ravel` made into `parts`."""
    pieces = {name: part for bucket in parts for name, part in bucket.items()}
    leaves, structure = jax.tree.flatten(like)
    groups = _groups(jax.tree.unflatten(structure, range(len(leaves))), scope, like)
    out: list[Any] = [None] * len(leaves)
    for name, positions in groups.items():
        found = [piece for piece in pieces if piece.partition(_CUT)[0] == name]
        found.sort(key=lambda piece: int(piece.partition(_CUT)[2] or 0))
        vectors = [pieces[piece].ravel() for piece in found]
        members = [leaves[i] for i in positions]
        for i, leaf in zip(positions, _uncut(vectors, members), strict=True):
            out[i] = leaf
    return jax.tree.unflatten(structure, out)


def _groups(tree: PyTree, scope: Scope, shapes: PyTree | None = None) -> dict[str, list[Any]]:
    """The leaves of each part, by its name, in the order of first appearance."""
    groups: dict[str, list[Any]] = {}
    shapes = tree if shapes is None else shapes
    for (path, leaf), shape in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(shapes), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(scope, str):
            name = scope(name, shape)
        elif scope == "model":
            name = scope
        groups.setdefault(name.replace(_CUT, ""), []).append(leaf)
    return groups


def _pieces(name: str, leaves: list[jax.Array], limit: int) -> Bucket:
    total = sum(leaf.size for leaf in leaves)
    if total == 0:
        return {}
    if len(leaves) == 1 and total <= limit:
        return {name: leaves[0].astype(jnp.float32)}
    vectors = _cut(leaves, -(-total // -(-total // limit)))
    names = [name] if len(vectors) == 1 else [f"{name}{_CUT}{i}" for i in range(len(vectors))]
    return dict(zip(names, vectors, strict=True))


def _cut(leaves: list[jax.Array], size: int) -> list[jax.Array]:
    """The leaves one after the other, as vectors of `size`, but for the last."""
    pieces: list[list[jax.Array]] = [[]]
    room = size
    for leaf in leaves:
        flat = jnp.ravel(leaf).astype(jnp.float32)
        while flat.size:
            part, flat = flat[:room], flat[room:]
            pieces[-1].append(part)
            room -= part.size
            if not room:
                room = size
                pieces.append([])
    return [jnp.concatenate(parts) for parts in pieces if parts]


def _uncut(vectors: list[jax.Array], likes: list[Like]) -> list[jax.Array]:
    """The leaves that `_cut` made into `vectors`."""
    out: list[jax.Array] = []
    number = start = 0
    for leaf in likes:
        missing = math.prod(leaf.shape)
        parts = [jnp.zeros((0,), jnp.float32)]
        while missing:
            part = vectors[number][start : start + missing]
            parts.append(part)
            missing -= part.size
            start += part.size
            if start == vectors[number].size:
                number, start = number + 1, 0
        out.append(jnp.concatenate(parts).reshape(leaf.shape))
    return out


def like(tree: PyTree) -> PyTree:
    """The tree as the exchange sees it: the same shapes, in float32."""
    return jax.tree.map(_float32, tree)


def _float32(leaf: Like) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
