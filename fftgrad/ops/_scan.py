"""Running sums and maxima: in order on a CPU, in two levels elsewhere.

XLA scans a long vector in many dependent passes, or one of quadratic work. On a CPU a loop of a few
values a turn takes a fifth of the time. On an accelerator rows of 128 take seven elementwise
passes, which fuse, and leave 1/128 of the values, few enough for quadratic work.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad.ops import _platform, _rows

ROW = 128
QUADRATIC = 1 << 13

UNROLLED = 4
"""Values a turn: from 16 on XLA for CPUs runs the turns one by one, a hundred times slower."""


def cumsum(x: jax.Array) -> jax.Array:
    """Inclusive running sums of int32[n]."""
    return _platform.dependent(
        x, cpu=functools.partial(_in_order, lax.add), default=_cumsum_at_once
    )


def _cumsum_at_once(x: jax.Array) -> jax.Array:
    # Not the last column of the scanned rows: a sum is one kernel, and they are one with the end.
    totals = jnp.sum(_rows.rows(x, ROW), axis=1, dtype=jnp.int32)
    few = totals.size <= QUADRATIC
    before = _sums_before(totals) if few else lax.cumsum(totals) - totals
    return (_scan_rows(x, lax.add) + before[:, None]).ravel()[: x.size]


def _sums_before(x: jax.Array) -> jax.Array:
    i = lax.iota(jnp.int32, x.size)
    return jnp.sum(jnp.where(i[None] < i[:, None], x[None], 0), axis=1, dtype=jnp.int32)


def cummax(x: jax.Array) -> jax.Array:
    """Running maxima of int32[n], none of them negative."""
    return _platform.dependent(
        x, cpu=functools.partial(_in_order, lax.max), default=_cummax_at_once
    )


def _cummax_at_once(x: jax.Array) -> jax.Array:
    rows = _scan_rows(x, lax.max)
    before = jnp.pad(lax.cummax(rows[:, -1]), (1, 0))[:-1]
    return jnp.maximum(rows, before[:, None]).ravel()[: x.size]


def _in_order(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = combine(carry, value)
        return carry, carry

    return lax.scan(step, _axes.vary_like(jnp.int32(0), x), x, unroll=UNROLLED)[1]


def _scan_rows(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Running results inside each row; zero is neutral."""
    rows, step = _rows.rows(x, ROW), 1
    while step < ROW:
        moved = lax.pad(rows, rows.dtype.type(0), ((0, 0, 0), (step, -step, 0)))
        rows = combine(rows, moved)
        step *= 2
    return rows
