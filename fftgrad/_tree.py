"""Pytree <-> float32 vectors."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fftgrad._base import Like, PyTree

BUCKET_LIMIT = 2**30
"""Longest vector: positions are int32, and one transform of it is 4 GiB, cuFFT's limit."""


def check_leaf(owner: str, name: str, leaf: Any) -> None:
    """Refuses what cannot be cast to float32 without loss."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        raise TypeError(
            f"{owner}({name}): must be a float32, bfloat16 or float16 array, got "
            f"{type(leaf).__name__ if dtype is None else dtype}; cast it, or keep it out of the "
            "exchange with optax.partition."
        )


def buckets(tree: PyTree, limit: int = BUCKET_LIMIT) -> list[jax.ShapeDtypeStruct]:
    """The vectors that `ravel` makes of a tree of this shape.

    As few as the limit allows, and of equal length but for the last.
    """
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
    if total == 0:
        return []
    size = -(-total // -(-total // limit))
    return [
        jax.ShapeDtypeStruct((min(size, total - start),), jnp.float32)
        for start in range(0, total, size)
    ]


def ravel(tree: PyTree, limit: int = BUCKET_LIMIT) -> list[jax.Array]:
    """The leaves of a tree, cast to float32, one after the other, cut into buckets."""
    pieces: list[list[jax.Array]] = [[]]
    room = [bucket.shape[0] for bucket in buckets(tree, limit)]
    for leaf in jax.tree.leaves(tree):
        flat = jnp.ravel(leaf).astype(jnp.float32)
        while flat.size:
            part, flat = flat[: room[0]], flat[room[0] :]
            pieces[-1].append(part)
            room[0] -= part.size
            if not room[0]:
                room.pop(0)
                pieces.append([])
    return [jnp.concatenate(parts) for parts in pieces if parts]


def unravel(vectors: list[jax.Array], like: PyTree) -> PyTree:
    """The tree, of float32 leaves, that `ravel` cut into `vectors`."""
    leaves, structure = jax.tree.flatten(like)
    out: list[jax.Array] = []
    bucket = start = 0
    for leaf in leaves:
        missing = math.prod(leaf.shape)
        parts = [jnp.zeros((0,), jnp.float32)]
        while missing:
            part = vectors[bucket][start : start + missing]
            parts.append(part)
            missing -= part.size
            start += part.size
            if start == vectors[bucket].size:
                bucket, start = bucket + 1, 0
        out.append(jnp.concatenate(parts).reshape(leaf.shape))
    return jax.tree.unflatten(structure, out)


def like(tree: PyTree) -> PyTree:
    """The tree as the exchange sees it: the same shapes, in float32."""
    return jax.tree.map(_float32, tree)


def _float32(leaf: Like) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
