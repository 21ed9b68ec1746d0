"""Parts in equal shards, one for each worker.

Where w does not divide n, the first shards have one value more than the others, which are padded
with a zero. So no shard holds more than one value that is no part of the gradient, and `real` says
where: what comes back for it must not be kept, or a memory would pile it up.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree
from fftgrad.exchanges import _parts


def to_shards(x: PyTree, workers: int) -> list[jax.Array]:
    """Each part as float32[workers, size], one row for each worker."""
    return [_to_rows(part.ravel(), workers) for part in jax.tree.leaves(x)]


def from_shards(shards: Sequence[jax.Array], like: PyTree) -> PyTree:
    """The inverse of `to_shards`."""
    leaves = jax.tree.leaves(like)
    flat = [_from_rows(rows, leaf.size) for rows, leaf in zip(shards, leaves, strict=True)]
    return _parts.rebuild(flat, like)


def shard_likes(like: PyTree, workers: int) -> PyTree:
    """The shape and dtype of one shard of each part, in a tree like theirs."""
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct((-(-math.prod(part.shape) // workers),), jnp.float32),
        like,
    )


def only_real(
    shards: Sequence[jax.Array], like: PyTree, workers: int, number: jax.Array
) -> tuple[jax.Array, ...]:
    """Shard `number` of each part, with zero for what is no part of it."""
    leaves = jax.tree.leaves(like)
    return tuple(
        _clear_padding(shard, math.prod(leaf.shape), workers, number)
        for shard, leaf in zip(shards, leaves, strict=True)
    )


def _clear_padding(shard: jax.Array, n: int, workers: int, number: jax.Array) -> jax.Array:
    longer = n % workers
    if longer == 0:
        return shard
    return shard.at[-1].set(jnp.where(number < longer, shard[-1], 0.0))


def _to_rows(flat: jax.Array, workers: int) -> jax.Array:
    size, longer = divmod(flat.size, workers)
    if longer == 0:
        return flat.reshape(workers, size)
    head = flat[: longer * (size + 1)].reshape(longer, size + 1)
    rest = flat[longer * (size + 1) :].reshape(workers - longer, size)
    return jnp.concatenate([head, jnp.pad(rest, ((0, 0), (0, 1)))])


def _from_rows(rows: jax.Array, n: int) -> jax.Array:
    workers = rows.shape[0]
    longer = n % workers
    if longer == 0:
        return rows.ravel()
    return jnp.concatenate([rows[:longer].ravel(), rows[longer:, :-1].ravel()])
