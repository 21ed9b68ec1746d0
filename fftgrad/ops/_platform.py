"""Programs that differ by platform: all are traced, and the one that runs is compiled."""

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax import lax

OTHER = "TF32_TF32_F32_X3"
"""A precision of products that no program has by default."""

_ONE = contextvars.ContextVar("one_platform", default=False)


def dependent(*args: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """`lax.platform_dependent`, or only the default where nothing but shapes is asked for."""
    if _ONE.get():
        return default(*args)
    return lax.platform_dependent(*args, default=default, **branches)


@contextlib.contextmanager
def one() -> Generator[None]:
    """Traces one platform, for what is the same on all: shapes and collectives."""
    token = _ONE.set(True)
    try:
        # JAX keeps traces by settings such as this one, which no shape depends on. Under another
        # than that of the program it never takes a trace of one platform for one of all.
        with jax.default_matmul_precision(OTHER):
            yield
    finally:
        _ONE.reset(token)
