"""Counts of values, and counters that never become negative."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _platform

LONG_ROW = 1 << 12
"""What an accelerator counts in one row: few rows are left to add up."""

MOST = 2**31 - 1
"""The largest count, which stands for itself and for all that are larger."""


def add(a: Any, b: Any) -> Any:
    """Add two counts of at least 0, int32[...], and stay at `MOST`.

    The Python number 0 adds nothing: a codec that never counts anything keeps it.
    """
    if isinstance(a, int) and isinstance(b, int):
        return min(a + b, MOST)
    if isinstance(a, int) and a == 0:
        return b
    return a + jnp.minimum(b, MOST - a)


def total(counts: jax.Array) -> jax.Array:
    """Sum the counts of an array, int32[...], and stay at `MOST`."""
    return lax.reduce(counts, np.int32(0), add, tuple(range(counts.ndim)))


def rounded(count: jax.Array) -> jax.Array:
    """The nearest whole number to a count in float32, int32[], and `MOST` at most."""
    return jnp.where(count < 2.0**31, jnp.round(count).astype(jnp.int32), MOST)


def next_step(number: jax.Array, period: int = 1) -> jax.Array:
    """Number of the step after step `number`, int32[]; about 2^30 comes after `MOST`.

    The number is never small or negative again, so no schedule starts again. It still changes in
    every step, so random draws differ, and its place in a period of steps is kept.
    """
    back = max((1 << 30) // period, 1) * period
    return jnp.where(number == MOST, MOST + 1 - back, number + 1)


def counts(masks: Sequence[jax.Array]) -> list[jax.Array]:
    """How many values of each mask bool[rows, columns] hold, int32[] each.

    Masks of the same data are counted together: a value is read once for all of them.
    """
    # XLA for TPUs makes one pass of sums that are written one by one, and of one reduction with
    # many results many; for CPUs and GPUs it is the other way round.
    return _platform.dependent(list(masks), tpu=_one_by_one, default=_together)


def _one_by_one(masks: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(mask, dtype=jnp.int32) for mask in masks]


def _together(masks: list[jax.Array]) -> list[jax.Array]:
    # Rows first: XLA runs a reduction to a few scalars on one thread of a CPU.
    return _sums(_sums([mask.astype(jnp.int32) for mask in masks]))


def _sums(columns: list[jax.Array]) -> list[jax.Array]:
    """The sum of each along its last axis."""
    zeros = (np.int32(0),) * len(columns)
    return list(lax.reduce(tuple(columns), zeros, _add, (columns[0].ndim - 1,)))


def _add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
