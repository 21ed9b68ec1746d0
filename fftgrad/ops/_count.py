"""How many values pass each of several tests, in one pass over them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _platform

LONG_ROW = 1 << 12
"""What an accelerator counts in one row: few rows are left to add up."""


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
