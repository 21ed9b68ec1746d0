"""How many coefficients a selector keeps."""

import math
from typing import Any

import jax
import numpy as np


def check(owner: str, fraction: float | None, k: int | None) -> None:
    """Refuses what does not say how many of n are kept."""
    if (fraction is None) == (k is None):
        raise ValueError(
            f"{owner}(fraction, k): exactly one must be given, got fraction={fraction}, k={k}; use "
            f"{owner}(fraction=0.01)."
        )
    check_static(f"{owner}(fraction)", fraction, float | int)
    check_static(f"{owner}(k)", k, int)
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(
            f"{owner}(fraction): the share kept must be in (0, 1], got {fraction}; to drop a share "
            f"theta use {owner}(fraction=1 - theta)."
        )
    if k is not None and k < 1:
        raise ValueError(f"{owner}(k): must be at least 1, got {k}; use {owner}(k=1).")


def check_static(name: str, value: Any, kind: Any) -> None:
    """Refuses what is not a Python number of this kind."""
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return
    wanted = "int" if kind is int else "int or float"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{name}: must be a Python {wanted}, because the size of the payload is static, got "
            f"{value!r}; to change it while training use Scheduled, and under "
            "optax.inject_hyperparams name it in static_args."
        )
    raise TypeError(
        f"{name}: must be a Python {wanted}, got {value!r}; pass a number without quotes"
        f"{', such as 100' if kind is int else ', such as 0.01'}."
    )


def count(fraction: float | None, k: int | None, n: int) -> int:
    """How many of n are kept."""
    if k is not None:
        return min(k, n)
    # Rounded first: 0.07 * 100 is a little above 7 in binary.
    return max(1, math.ceil(round((fraction or 0.0) * n, 6)))


def shard(k: int | None, parts: int) -> int | None:
    """How many are kept of each of several equal parts of a vector of which k are kept."""
    return None if k is None else -(-k // parts)
