"""What a larger state has of ours in it, also where named tuples have become dicts."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import PyTree
from fftgrad.exchanges._per_worker import OfShards, PerWorker
from fftgrad.training._capture import CaptureState
from fftgrad.training._pmean import CompressedPmeanState


def is_pmean(node: Any) -> bool:
    """The state of `compressed_pmean`; a dict of it may lack what is empty."""
    if isinstance(node, Mapping):
        keys = set(cast("Mapping[Any, Any]", node))
        return {"step", "skipped", "overflow"} <= keys <= set(CompressedPmeanState._fields)
    return isinstance(node, CompressedPmeanState)


def is_own(node: Any) -> bool:
    """What each worker has of its own; a dict that looks like it may be something else."""
    if isinstance(node, Mapping):
        return list(cast("Mapping[Any, Any]", node)) == ["value"]
    return isinstance(node, PerWorker)


def is_capture(node: Any) -> bool:
    """The state of `capture`."""
    if isinstance(node, Mapping):
        return set(cast("Mapping[Any, Any]", node)) == set(CaptureState._fields)
    return isinstance(node, CaptureState)


def is_ours(node: Any) -> bool:
    """Any of them, beyond doubt."""
    return is_pmean(node) or is_capture(node) or isinstance(node, PerWorker)


def check_order(state: PyTree) -> None:
    """Refuses what optax keeps of one worker's gradients as if it were the same on all."""
    for chain in jax.tree.leaves(state, is_leaf=_is_chain):
        suspects: list[str] = []
        for part in cast("tuple[Any, ...]", chain) if _is_chain(chain) else ():
            if any(map(is_pmean, jax.tree.leaves(part, is_leaf=is_pmean))):
                if suspects:
                    raise ValueError(
                        "state_specs(opt_state): what comes before compressed_pmean sees the "
                        f"gradients of one worker, got {suspects[0]}, which would differ between "
                        "the workers and count as replicated; wrap that transformation as "
                        "fg.per_worker(...), or put it behind compressed_pmean."
                    )
                check_order(part)
                break
            if _differs(part):
                suspects.append(type(part).__name__)


def check_around(state: PyTree) -> None:
    """Refuses what would let each worker decide on its own whether it takes part."""
    for node in jax.tree.leaves(state, is_leaf=_is_apply_if_finite):
        if _is_apply_if_finite(node) and any(
            map(_exchanges, jax.tree.leaves(node, is_leaf=_exchanges))
        ):
            raise ValueError(
                "state_specs(opt_state): optax.apply_if_finite must not be around what exchanges, "
                "because each worker would decide by its own gradient whether to take part, and "
                "the others wait for it, got it around compressed_pmean or fg.optimizers.sharded; "
                "put it behind compressed_pmean in the chain, or leave it out: sharded undoes a "
                "bad step by itself."
            )


def _is_apply_if_finite(node: Any) -> bool:
    if isinstance(node, Mapping):
        return set(cast("Mapping[Any, Any]", node)) == set(optax.ApplyIfFiniteState._fields)
    return isinstance(node, optax.ApplyIfFiniteState)


def _exchanges(node: Any) -> bool:
    return is_pmean(node) or isinstance(node, OfShards)


def _is_chain(node: Any) -> bool:
    return type(node) is tuple


def _differs(part: Any) -> bool:
    """Whether it is a state of optax with arrays like parameters, for all leaves."""
    nodes = jax.tree.leaves(part, is_leaf=lambda n: isinstance(n, PerWorker | optax.MaskedNode))
    return (
        type(part).__module__.startswith("optax")
        and not any(isinstance(node, optax.MaskedNode) for node in nodes)
        and any(
            jnp.ndim(node) and jnp.issubdtype(node.dtype, jnp.floating)
            for node in nodes
            if not isinstance(node, PerWorker)
        )
    )
