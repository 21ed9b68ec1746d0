"""Platform-dependent programs: all branches are traced, and one is compiled."""

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax import lax

OTHER = "TF32_TF32_F32_X3"
"""A matmul precision that no program has by default."""

_ONE = contextvars.ContextVar("one_platform", default=False)


def dependent(*args: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """Call `lax.platform_dependent`, or inside `one` only the default."""
    if _ONE.get():
        return default(*args)
    return lax.platform_dependent(*args, default=default, **branches)


@contextlib.contextmanager
def one() -> Generator[None]:
    """Trace only the default branch, to compute shapes and collectives."""
    token = _ONE.set(True)
    try:
        # JAX caches traces by settings such as this precision. A setting that no program uses keeps
        # these traces apart from those of all platforms.
        with jax.default_matmul_precision(OTHER):
            yield
    finally:
        _ONE.reset(token)
