"""Programs with a branch for each platform: JAX traces all branches and compiles one."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax import lax

OTHER = "TF32_TF32_F32_X3"
"""A default matmul precision that no program uses; see `one`."""

_POSSIBLE = contextvars.ContextVar("possible", default=frozenset({"cpu", "tpu", "gpu"}))
"""Platforms that are possible inside the current branches."""


def dependent(*args: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """Call `lax.platform_dependent`, without the branches that an enclosing branch excludes.

    `branches` may have the names "cpu" and "tpu"; `default` is for all other platforms.
    """
    possible = _POSSIBLE.get()
    named = possible & branches.keys()
    if named == possible:
        return branches[min(possible)](*args)
    if not named:
        return default(*args)
    return lax.platform_dependent(
        *args,
        default=_traced(default, possible - named),
        **{name: _traced(branches[name], frozenset({name})) for name in sorted(named)},
    )


def first(run: Callable[..., Any]) -> Callable[..., Any]:
    """Choose the platform outside `run`, because `jax.vmap` would trace inner branches again."""
    return lambda *args: dependent(*args, cpu=run, default=run)


def _traced(branch: Callable[..., Any], possible: frozenset[str]) -> Callable[..., Any]:
    # JAX caches the trace of a function by identity, so return the same object for the same branch.
    is_module_level = getattr(branch, "__closure__", branch) is None
    return (_kept if is_module_level else _inside)(branch, possible)


def _inside(branch: Callable[..., Any], possible: frozenset[str]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _set(possible):
            return branch(*args)

    return run


_kept = functools.lru_cache(maxsize=256)(_inside)


@contextlib.contextmanager
def _set(possible: frozenset[str]) -> Generator[None]:
    token = _POSSIBLE.set(possible)
    try:
        yield
    finally:
        _POSSIBLE.reset(token)


@contextlib.contextmanager
def one() -> Generator[None]:
    """Trace only the branches for GPUs, to compute shapes and collectives."""
    # JAX caches a trace for each setting of this precision. No program uses OTHER, so no program
    # gets a trace from the cache that has only the branches for GPUs.
    with _set(frozenset({"gpu"})), jax.default_matmul_precision(OTHER):
        yield
