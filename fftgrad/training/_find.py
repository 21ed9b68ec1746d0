"""What a larger state has of ours in it, also where named tuples have become dicts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import PyTree
from fftgrad.exchanges._per_worker import OfShards, PerWorker
from fftgrad.training._pmean import CompressedPmeanState

SHARDED = {"step", "skipped", "inner", "ahead", "worker"}
"""By what the state of `fg.optimizers.sharded` is known, which is made on a higher floor."""


def is_pmean(node: Any) -> bool:
    """The state of `compressed_pmean`; a dict of it may lack what is empty."""
    if isinstance(node, Mapping):
        keys = set(cast("Mapping[Any, Any]", node))
        return {"step", "skipped", "overflow"} <= keys <= set(CompressedPmeanState._fields)
    return isinstance(node, CompressedPmeanState)


def is_own(node: Any) -> bool:
    """What each worker has of its own. A dict of it has the name of its field, which is ours."""
    if isinstance(node, Mapping):
        return tuple(cast("Mapping[Any, Any]", node)) == PerWorker._fields
    return isinstance(node, PerWorker)


def is_sharded(node: Any) -> bool:
    """The state of `fg.optimizers.sharded`; a dict of it may lack what is empty."""
    return _keys(node) >= SHARDED


def _keys(node: Any) -> set[Any]:
    """The keys of a dict, or the fields of a named tuple."""
    keys = node if isinstance(node, Mapping) else getattr(node, "_fields", ())
    return set(cast("Iterable[Any]", keys))


def is_ours(node: Any) -> bool:
    """Any of them."""
    return is_pmean(node) or is_own(node) or is_sharded(node)


def children(node: Any) -> list[tuple[Any, Any]]:
    """What is directly below a node, with its key."""
    pairs = jax.tree.leaves_with_path(node, is_leaf=lambda other: other is not node)
    return [(path[0], child) for path, child in pairs if path]


def text(key: Any) -> str:
    """A key, position or field alike."""
    return jax.tree_util.keystr((key,), simple=True)


def moments(state: PyTree, fields: frozenset[str]) -> str | None:
    """The first optimizer state in it that has one of these fields, by the name of its type."""

    def has(node: Any) -> bool:
        return not fields.isdisjoint(getattr(node, "_fields", ()))

    return next((type(n).__name__ for n in jax.tree.leaves(state, is_leaf=has) if has(n)), None)


def check_order(state: PyTree, name: str = "") -> None:
    """Refuses what counts as the same on all workers and is kept of one worker's gradients.

    And moments behind a whole optimizer. A list is no chain, because what a step carries beside the
    state may come before it.
    """
    parts = [] if is_own(state) or _exchanges(state) else children(state)
    is_dict = isinstance(state, Mapping)
    # The groups of optax.partition may have numbers for names.
    if type(state) is tuple or (is_dict and name != "inner_states" and _is_numbered(parts)):
        parts = sorted(parts, key=lambda part: int(text(part[0])))
        first = next((n for n, (_, part) in enumerate(parts) if has_mean(part, is_dict)), 0)
        for key, part in parts[:first]:
            kept = next(_of_gradients(part, (key,), is_dict), None)
            if kept is not None:
                raise ValueError(
                    "state_specs(opt_state): what comes before compressed_pmean sees the "
                    f"gradients of one worker, got {kept}, which would differ between the workers "
                    "and count as replicated; wrap that transformation as fg.per_worker(...), or "
                    "put it behind compressed_pmean. If these are optimizers of their own, carry "
                    "them in a list, or in a dict by names."
                )
        _check_behind([part for _, part in parts])
    for key, part in parts:
        check_order(part, text(key))


def _check_behind(parts: list[Any]) -> None:
    """Refuses an optimizer that takes the updates of a whole one for gradients."""
    is_whole = [any(map(_is_whole, jax.tree.leaves(part, is_leaf=_exchanges))) for part in parts]
    for n, part in enumerate(parts):
        found = None if has_mean(part) else moments(part, frozenset({"mu", "nu", "trace"}))
        if found and any(is_whole[:n]):
            raise ValueError(
                "state_specs(opt_state): must have no other optimizer behind one of fg.optimizers, "
                "because its updates are final, and as gradients they would lead uphill, got "
                f"{found}; leave that optimizer out, or put fg.compressed_pmean in place of the "
                "whole one. If these are optimizers of their own, carry them in a list, or in a "
                "dict by names."
            )


def check_around(state: PyTree) -> None:
    """Refuses wrappers that would leave out the exchange on one worker, or on all."""
    for node in jax.tree.leaves(state, is_leaf=_is_conditional):
        if not any(map(_exchanges, jax.tree.leaves(node, is_leaf=_exchanges))):
            continue
        if isinstance(node, optax.ConditionallyTransformState):
            raise ValueError(
                "state_specs(opt_state): optax.conditionally_transform must not be around what "
                "exchanges, because in all other steps each worker would apply its own gradient, "
                "got it around compressed_pmean or a whole optimizer; put it behind "
                "compressed_pmean in the chain, or change the exchange over time by fg.Scheduled."
            )
        if _is_apply_if_finite(node):
            raise ValueError(
                "state_specs(opt_state): optax.apply_if_finite must not be around what exchanges, "
                "because each worker would decide by its own gradient whether to take part, and "
                "the others wait for it, got it around compressed_pmean or fg.optimizers.sharded; "
                "put it behind compressed_pmean in the chain, or leave it out: whole optimizers "
                "leave out a bad step by themselves."
            )


def _is_conditional(node: Any) -> bool:
    return isinstance(node, optax.ConditionallyTransformState) or _is_apply_if_finite(node)


def _is_apply_if_finite(node: Any) -> bool:
    if isinstance(node, Mapping):
        return set(cast("Mapping[Any, Any]", node)) == set(optax.ApplyIfFiniteState._fields)
    return isinstance(node, optax.ApplyIfFiniteState)


def _is_whole(node: Any) -> bool:
    return type(node).__module__.startswith("fftgrad.optimizers")


def _exchanges(node: Any) -> bool:
    return is_pmean(node) or isinstance(node, OfShards) or _is_whole(node)


def _is_numbered(parts: list[tuple[Any, Any]]) -> bool:
    return all(text(key).isdecimal() for key, _ in parts)


def has_mean(part: Any, is_dict: bool = False) -> bool:
    """Whether it is a transformation with an exchange in it.

    Where tuples have become dicts, a pair of a model and its optimizer looks like a chain of two,
    but for the names on the way to the mean.
    """
    if not is_dict:
        return any(map(_exchanges, jax.tree.leaves(part, is_leaf=_exchanges)))
    return is_pmean(part) or any(
        has_mean(child, is_dict)
        for key, child in children(part)
        if text(key).isdecimal() or text(key) in ("inner", "inner_state", "pmean")
    )


def _of_gradients(node: Any, path: tuple[Any, ...], is_dict: bool, of: str = "") -> Iterator[str]:
    """The states of optax with floats or flags of gradients; in dicts, these by their path."""
    if is_own(node):
        return
    if jax.tree_util.all_leaves([node]):
        name = jax.tree_util.keystr(path) if is_dict else of
        dtype: Any = getattr(node, "dtype", int)
        if name and (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.bool_)):
            yield name
        return
    of = type(node).__name__ if type(node).__module__.startswith("optax") else of
    for key, child in children(node):
        if text(key) != "hyperparams":  # of optax.inject_hyperparams, the same on all
            yield from _of_gradients(child, (*path, key), is_dict, of)
