"""Platform-dependent programs: all branches are traced, and one is compiled."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax import lax

OTHER = "TF32_TF32_F32_X3"
"""A matmul precision that no program has by default."""

_POSSIBLE = contextvars.ContextVar("possible", default=frozenset({"cpu", "tpu", "gpu"}))
"""The platforms that the branches around a call leave possible."""


def dependent(*args: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """Call `lax.platform_dependent`, without branches that the branch around it excludes.

    Branches are named "cpu" and "tpu"; the default is for all other platforms.
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
    """Choose the platform before `run`, not inside: `jax.vmap` traces the branches inside anew."""
    return lambda *args: dependent(*args, cpu=run, default=run)


def _traced(branch: Callable[..., Any], possible: frozenset[str]) -> Callable[..., Any]:
    # JAX keeps the trace of a function as long as it is the same object.
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
    """Trace only the branches of a GPU, to compute shapes and collectives."""
    # JAX caches traces by settings such as this precision. A setting that no program uses keeps
    # these traces apart from those of all platforms.
    with _set(frozenset({"gpu"})), jax.default_matmul_precision(OTHER):
        yield
