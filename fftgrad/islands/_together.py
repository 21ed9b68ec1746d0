"""The processes of one island, of which the first alone talks to the store."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fftgrad._contracts import PyTree


def is_first() -> bool:
    """Whether this process talks to the store."""
    return jax.process_index() == 0


NO, YES, FAILED = range(3)


def first_says(ask: Callable[[], bool]) -> bool:
    """What the first process answers, on all; where it fails, all do."""
    told, failure = NO, None
    if is_first():
        try:
            told = YES if ask() else NO
        except Exception as error:
            told, failure = FAILED, error
    if jax.process_count() > 1:
        told = int(multihost_utils.broadcast_one_to_all(np.int32(told)))
    if told == FAILED:
        raise failure or RuntimeError("Island: the first process of it failed.")
    return told == YES


def share(tree: PyTree) -> PyTree:
    """A tree of arrays of the first process, on all."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def to_host(leaf: Any) -> Any:
    """A copy of a whole array on the host of each process."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.array(leaf, np.float32)


def to_devices(value: np.ndarray[Any, Any], like: Any) -> Any:
    """An array of the host where another one is, in its dtype."""
    value = value.astype(like.dtype)
    if not isinstance(like, jax.Array):
        return jax.device_put(value)
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])
