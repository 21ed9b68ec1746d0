"""State that differs between workers."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree, State


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
