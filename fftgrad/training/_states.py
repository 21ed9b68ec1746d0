"""The states that count steps, also where a framework has made dicts of named tuples."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax

from fftgrad._contracts import PyTree
from fftgrad.exchanges._per_worker import OfShards, PerWorker, is_rows
from fftgrad.training._pmean import CompressedPmeanState


class ShardedState(NamedTuple):
    """State of `fg.optimizers.sharded`.

    Attributes:
      step: how many updates there were, int32, equal on all workers.
      skipped: how many of them were left out, because anything was not finite; equal on all.
      memory: of the gradients that each worker could not send.
      inner: the inner optimizer's state, of which each worker has that of its shard.
      ahead: by how much the owner's own parameters differ from what all workers have, float32.
    """

    step: jax.Array
    skipped: jax.Array
    memory: PerWorker
    inner: OfShards
    ahead: OfShards


def is_state(node: Any, *kinds: type) -> bool:
    """Whether a node is a state of a kind, or a dict of one, which may lack what is empty."""
    if isinstance(node, Mapping):
        keys = set(cast("Mapping[Any, Any]", node))
        return any({"step", "skipped"} <= keys <= set(kind.__annotations__) for kind in kinds)
    return isinstance(node, kinds)


def has_ours(tree: PyTree) -> bool:
    """Whether a tree has a state of `compressed_pmean` in it, or rows of workers."""

    def is_ours(node: Any) -> bool:
        return is_rows(node) or is_state(node, CompressedPmeanState)

    return any(map(is_ours, jax.tree.leaves(tree, is_leaf=is_ours)))
