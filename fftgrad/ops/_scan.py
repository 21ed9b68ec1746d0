"""Running sums and maxima in two levels: inside rows of fixed length, then over the rows.

XLA scans a long vector in many dependent passes, or one of quadratic work. Rows of 128 take seven
elementwise passes, which fuse, and leave 1/128 of the values to scan.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.ops import _rows

ROW = 128


def cumsum(x: jax.Array) -> jax.Array:
    """Inclusive running sums of int32[n]."""
    rows = _scan_rows(x, jnp.add)
    totals = rows[:, -1]
    return (rows + (lax.cumsum(totals) - totals)[:, None]).ravel()[: x.size]


def cummax(x: jax.Array) -> jax.Array:
    """Running maxima of int32[n], none of them negative."""
    rows = _scan_rows(x, jnp.maximum)
    before = jnp.pad(lax.cummax(rows[:, -1]), (1, 0))[:-1]
    return jnp.maximum(rows, before[:, None]).ravel()[: x.size]


def _scan_rows(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Running results inside each row; zero is neutral."""
    rows = _rows.rows(x, ROW)
    step = 1
    while step < ROW:
        rows = combine(rows, jnp.pad(rows[:, :-step], ((0, 0), (step, 0))))
        step *= 2
    return rows
