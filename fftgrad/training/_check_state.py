"""Whether a state is one that this transformation made."""

from typing import Any

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree

_REMEDY = (
    "start from fg.init_state(tx, params, mesh, axis_name), or restore into a state of the "
    "exchange, "
    "memory and layout that made it."
)


def check_state(state: Any, wanted: Any, made_by: str, updates: PyTree) -> None:
    """Refuses a state unlike `wanted`, the shapes that init makes, and names the first difference.

    Containers may differ, as after a restore; paths, shapes and dtypes may not. A leading axis of
    workers that is not 1 is left to `drop_worker_axis`, which knows the remedy.
    """
    if not hasattr(state, "memory") or not hasattr(state, "exchange"):
        raise TypeError(
            f"compressed_pmean(state): must be a {type(wanted).__name__}, got "
            f"{type(state).__name__}; {_REMEDY}"
        )
    _check_complete(_by_path(state.memory), _by_path(wanted.memory), _by_path(updates))
    if len(state.exchange) != len(wanted.exchange):
        raise ValueError(
            f"compressed_pmean(state.exchange): must have a state for each of the "
            f"{len(wanted.exchange)} buckets of {made_by}, got {len(state.exchange)}; {_REMEDY}"
        )
    for field in ("memory", "exchange", "error"):
        _compare(f"state.{field}", getattr(state, field), getattr(wanted, field), made_by)


def _check_complete(found: dict[str, Any], needed: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuses gradients that lack a leaf for which the memory has something."""
    for path in [path for path in found if path not in needed]:
        pairs = ((whole, leaf) for whole in needed for leaf in given if leaf)
        starts = {whole.removesuffix(leaf) for whole, leaf in pairs if whole.endswith(leaf)}
        for start in sorted(starts, key=len):
            if path.startswith(start) and path != start:
                raise ValueError(
                    f"compressed_pmean(updates{path.removeprefix(start)}): must be a gradient, "
                    f"because the state has a memory of it, {_say(found[path])}, got none; pass "
                    "zeros for what has no gradient, or make the state by fg.init_state for the "
                    "parameters that have one."
                )


def _compare(name: str, state: PyTree, wanted: PyTree, made_by: str) -> None:
    found, needed = _by_path(state), _by_path(wanted)
    for path in [*needed, *found]:
        if path not in found or path not in needed:
            must = _say(needed[path]) if path in needed else "nothing there"
            got = _say(found[path]) if path in found else "nothing there"
            raise ValueError(
                f"compressed_pmean({name}{path}): must be {must}, as init makes it for {made_by}, "
                f"got {got}; {_REMEDY}"
            )
        one, other = found[path], needed[path]
        if not _fits(jnp.shape(one), other.shape) or jnp.result_type(one) != other.dtype:
            raise ValueError(
                f"compressed_pmean({name}{path}): must be {_say(other)}, as init makes it for "
                f"{made_by}, got {_say(one)}; {_REMEDY}"
            )


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if wanted[:1] == (1,) and len(found) == len(wanted):
        return found[1:] == wanted[1:]
    return found == wanted


def _say(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
