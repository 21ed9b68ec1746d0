"""State that differs between workers, and shards that each have one owner.

If w does not divide n, the first shards have one value more, and the others are padded with a copy
of their last value. Shards are not padded with zero, because a codec without a code for zero would
send another value, and the memory would accumulate the difference.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree, State
from fftgrad._values import check
from fftgrad.exchanges import _parts


class PerWorker(NamedTuple):
    """State: arrays that differ between workers, with a leading axis of workers.

    Inside `shard_map` the leading axis has length 1. The global array has a row per worker and is
    sharded over the workers, so it is saved and restored like any other array. If a framework turns
    named tuples into dicts, the field name `worker_rows` identifies the state.
    """

    worker_rows: PyTree


class Reset(NamedTuple):
    """State of a worker that is reset if the number of workers changes."""

    reset_rows: PyTree


def is_rows(node: Any) -> bool:
    """Return True for a `PerWorker`, or a dict that a framework made of one."""
    if isinstance(node, Mapping):
        return tuple(cast("Mapping[Any, Any]", node)) == PerWorker._fields
    return isinstance(node, PerWorker)


def add_worker_axis(value: PyTree) -> PerWorker:
    return PerWorker(jax.tree.map(lambda a: jnp.asarray(a)[None], value))


def add_rows(state: State) -> State:
    """Add a leading axis of workers to the `own` state of an exchange."""
    return State(state.shared, add_worker_axis(state.own))


def drop_rows(state: State) -> State:
    """Invert `add_rows`, inside the axis."""
    return State(state.shared, drop_worker_axis(state.own))


def drop_worker_axis(state: PerWorker) -> PyTree:
    """Invert `add_worker_axis`, inside the axis."""
    for path, leaf in jax.tree.leaves_with_path(state.worker_rows):
        argument = f"compressed_pmean(state{jax.tree_util.keystr(path)})"
        remedy = "use fg.state_specs(opt_state, axis_name) as its in_specs and out_specs."
        check(len(leaf) == 1, argument, "have one row inside the axis", len(leaf), remedy)
    return jax.tree.map(lambda a: a[0], state.worker_rows)


class Shards(NamedTuple):
    """State of a worker that keeps one shard of each part for its group."""

    cut_rows: PyTree  # memory state of the shard; resharding joins the shards and cuts them again
    cut_sizes: jax.Array  # number of values of each part, int32[parts], to join the shards
    cut_number: jax.Array  # number of shards, int32[]
    reset_rows: PyTree = ()  # state that is reset if the number of workers changes


def to_shards(x: PyTree, workers: int) -> list[jax.Array]:
    """Cut each part into float32[workers, size], one row per worker."""
    return [_to_rows(part.ravel(), workers) for part in jax.tree.leaves(x)]


def from_shards(shards: Sequence[jax.Array], like: PyTree) -> PyTree:
    """Invert `to_shards`."""
    sizes = [leaf.size for leaf in jax.tree.leaves(like)]
    return _parts.rebuild(list(map(_from_rows, shards, sizes)), like)


def shard_likes(like: PyTree, workers: int) -> PyTree:
    """Return the shape and dtype of one shard of each part."""
    size = lambda part: -(-math.prod(part.shape) // workers)  # noqa: E731
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct((size(part),), jnp.float32), like)


def _to_rows(flat: jax.Array, workers: int) -> jax.Array:
    size, longer = divmod(flat.size, workers)
    if longer == 0:
        return flat.reshape(workers, size)
    head = flat[: longer * (size + 1)].reshape(longer, size + 1)
    rest = flat[longer * (size + 1) :].reshape(workers - longer, size)
    # An empty shard has no value to copy, so it is padded with zero.
    fill = "edge" if size else "constant"
    return jnp.concatenate([head, jnp.pad(rest, ((0, 0), (0, 1)), mode=fill)])


def _from_rows(rows: jax.Array, n: int) -> jax.Array:
    workers = rows.shape[0]
    longer = n % workers
    if longer == 0:
        return rows.ravel()
    return jnp.concatenate([rows[:longer].ravel(), rows[longer:, :-1].ravel()])
