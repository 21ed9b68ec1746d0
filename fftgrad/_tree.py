"""Pytree <-> the float32 parts that are compressed each on its own."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fftgrad._base import Like, PyTree

Scope: TypeAlias = Literal["model", "leaf"] | Callable[[str, Like], str]
"""Which leaves form a part: all, each, or those to which a function gives the same name."""

Bucket: TypeAlias = dict[str, Any]
"""Parts by name, which travel together."""

BUCKET_LIMIT = 2**30
"""Most values in a bucket: positions are int32, and a transform of it is 4 GiB, cuFFT's limit."""


CUT = "#"
"""Between the name of a part and the number of its piece, where it is cut."""


class Member(NamedTuple):
    """A leaf of a group: its position among all leaves, its path, and itself."""

    number: int
    path: str
    leaf: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tree becomes buckets.

    Attributes:
      scope: which leaves form a part.
      limit: most values in a bucket.
      reverse: whether the last leaves come first, as a backward pass finds their gradients.
    """

    scope: Scope = "model"
    limit: int = BUCKET_LIMIT
    reverse: bool = False


def check_leaf(owner: str, name: str, leaf: Any) -> None:
    """Refuses what cannot be cast to float32 without loss."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        raise TypeError(
            f"{owner}({name}): must be a float32, bfloat16 or float16 array, got "
            f"{type(leaf).__name__ if dtype is None else dtype}; cast it, or keep it out of the "
            "exchange with optax.partition."
        )


def layout(owner: str, scope: Scope, bucket_bytes: int | None = None) -> Layout:
    """The layout of a scope in buckets of at most so many float32 bytes."""
    if scope not in ("model", "leaf") and not callable(scope):
        raise ValueError(
            f"{owner}(scope): must be 'model', 'leaf' or a function from a leaf's path and shape "
            f"to the name of its group, got {scope!r}; use 'model' to choose over all leaves."
        )
    if bucket_bytes is None:
        return Layout(scope)
    if bucket_bytes < 4:
        raise ValueError(
            f"{owner}(bucket_bytes): must be at least 4, the size of a value, got {bucket_bytes}; "
            "use 25_000_000, or None for one bucket."
        )
    return Layout(scope, min(bucket_bytes // 4, BUCKET_LIMIT), reverse=True)


def buckets(tree: PyTree, layout: Layout = Layout()) -> list[Bucket]:
    """The shapes of what `ravel` makes of a tree of this shape."""
    return jax.eval_shape(lambda tree: ravel(tree, layout), like(tree))


def ravel(tree: PyTree, layout: Layout = Layout()) -> list[Bucket]:
    """The parts of a tree, in float32, in as many buckets as the limit of each one's size needs.

    A part is a group of leaves, one after the other; a single leaf keeps its shape. What is longer
    than the limit is cut into pieces of equal length, but for the last.
    """
    out: list[Bucket] = []
    room = 0
    for name, members in groups(tree, layout).items():
        leaves = [member.leaf for member in members]
        for piece_name, piece in _pieces(name, leaves, layout.limit).items():
            if piece.size > room:
                out.append({})
                room = layout.limit
            out[-1][piece_name] = piece
            room -= piece.size
    return out


def unravel(parts: list[Bucket], like: PyTree, layout: Layout = Layout()) -> PyTree:
    """The tree, of float32 leaves, that `ravel` made into `parts`."""
    pieces = {name: part for bucket in parts for name, part in bucket.items()}
    out: list[Any] = [None] * len(jax.tree.leaves(like))
    for name, members in groups(like, layout).items():
        found = [piece for piece in pieces if piece.partition(CUT)[0] == name]
        found.sort(key=lambda piece: int(piece.partition(CUT)[2] or 0))
        vectors = [pieces[piece].ravel() for piece in found]
        leaves = _uncut(vectors, [member.leaf for member in members])
        for member, leaf in zip(members, leaves, strict=True):
            out[member.number] = leaf
    return jax.tree.unflatten(jax.tree.structure(like), out)


def groups(tree: PyTree, layout: Layout) -> dict[str, list[Member]]:
    """The leaves of each part, by its name, in the order of first appearance."""
    out: dict[str, list[Member]] = {}
    members = [
        Member(i, jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree))
    ]
    for member in reversed(members) if layout.reverse else members:
        name = layout.scope
        if not isinstance(name, str):
            name = name(member.path, member.leaf)
        elif name == "leaf":
            name = member.path
        out.setdefault(name.replace(CUT, ""), []).append(member)
    return out


def _pieces(name: str, leaves: list[jax.Array], limit: int) -> Bucket:
    total = sum(leaf.size for leaf in leaves)
    if total == 0:
        return {}
    if len(leaves) == 1 and total <= limit:
        return {name: leaves[0].astype(jnp.float32)}
    vectors = _cut(leaves, -(-total // -(-total // limit)))
    names = [name] if len(vectors) == 1 else [f"{name}{CUT}{i}" for i in range(len(vectors))]
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
