"""Parts in equal shards, one for each worker.

Where w does not divide n, the first shards have one value more than the others, which are padded
with a copy of their last value. A codec and a memory treat the copy as they treat that value, so it
changes no scale by more than its weight. A zero would not do: a codec without a code for zero sends
something for it, step by step, which a memory piles up and a scale then follows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree
from fftgrad.exchanges import _parts


class Shards(NamedTuple):
    """State of a group of workers, of which each keeps a shard of each part.

    Attributes:
      sizes: how many values each part has, int32[parts], by which what is kept can be joined.
      number: into how many shards it was cut, int32[].
      memory: a memory's state of the shard, to be joined and cut again for other workers.
      learned: what starts anew for another number of workers.
    """

    sizes: jax.Array
    number: jax.Array
    memory: PyTree
    learned: PyTree = ()


class PerShard(NamedTuple):
    """A worker's own state of its shards; it starts anew for other shards."""

    rows: PyTree


def start(like: PyTree, memory: PyTree, learned: PyTree, number: int) -> Shards:
    """The state before the first step, for parts like these."""
    sizes = [math.prod(part.shape) for part in jax.tree.leaves(like)]
    return Shards(jnp.asarray(sizes, jnp.int32), jnp.int32(number), memory, learned)


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


def _to_rows(flat: jax.Array, workers: int) -> jax.Array:
    size, longer = divmod(flat.size, workers)
    if longer == 0:
        return flat.reshape(workers, size)
    head = flat[: longer * (size + 1)].reshape(longer, size + 1)
    rest = flat[longer * (size + 1) :].reshape(workers - longer, size)
    # A shard without a value has none to copy, and is all zero.
    fill = "edge" if size else "constant"
    return jnp.concatenate([head, jnp.pad(rest, ((0, 0), (0, 1)), mode=fill)])


def _from_rows(rows: jax.Array, n: int) -> jax.Array:
    workers = rows.shape[0]
    longer = n % workers
    if longer == 0:
        return rows.ravel()
    return jnp.concatenate([rows[:longer].ravel(), rows[longer:, :-1].ravel()])
