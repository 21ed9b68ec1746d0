"""What differs between workers: their own state, and the shards of which each owns one.

Where w does not divide n, the first shards have one value more than the others, which are padded
with a copy of their last value. A codec and a memory treat the copy as they treat that value, so it
changes no scale by more than its weight. A zero would not do: a codec without a code for zero sends
something for it, step by step, which a memory piles up and a scale then follows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree, State
from fftgrad.exchanges import _parts


class PerWorker(NamedTuple):
    """State: arrays of which each worker has its own, under a leading axis of workers.

    Inside the axis that leading axis has length 1; the global array, sharded over it, has one row
    a worker. It is thus an ordinary array to save, restore and reshard. Where frameworks make dicts
    of named tuples, the name of the field is what tells it from a dict of parameters.
    """

    worker_rows: PyTree


class OfShards(NamedTuple):
    """State: what each worker keeps of its own shard; of no use to another number of workers."""

    value: PerWorker


def is_rows(node: Any) -> bool:
    """Whether a node is a `PerWorker`, or the dict that a framework has made of one."""
    if isinstance(node, Mapping):
        return tuple(cast("Mapping[Any, Any]", node)) == PerWorker._fields
    return isinstance(node, PerWorker)


def add_worker_axis(value: PyTree) -> PerWorker:
    """One worker's own state as its row of the global one."""
    return PerWorker(jax.tree.map(lambda a: jnp.asarray(a)[None], value))


def add_rows(state: State) -> State:
    """What an exchange keeps, with one worker's own and its shard as its rows of global arrays."""
    return State(state.shared, *map(add_worker_axis, (state.own, state.shards)))


def drop_rows(state: State) -> State:
    """The inverse of `add_rows`, inside the axis."""
    return State(state.shared, *map(drop_worker_axis, (state.own, state.shards)))


def drop_worker_axis(state: PerWorker) -> PyTree:
    """The inverse of `add_worker_axis`, inside the axis."""
    for path, leaf in jax.tree.leaves_with_path(state.worker_rows):
        if leaf.shape[0] != 1:
            raise ValueError(
                f"compressed_pmean(state{jax.tree_util.keystr(path)}): inside the axis the leading "
                f"worker axis must have length 1, got {leaf.shape[0]}; shard the state with "
                "fg.state_specs(opt_state, axis_name) as its in_specs and out_specs."
            )
    return jax.tree.map(lambda a: a[0], state.worker_rows)


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
