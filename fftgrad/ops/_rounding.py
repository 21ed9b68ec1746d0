"""Rounding to a narrower dtype, where what it drops is counted."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 values, rounded to those that `dtype` has, which may be bfloat16 or float16.

    They stay float32, so that `x - rounded(x, dtype)` is what a cast of them drops.
    """
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    # No cast there and back, which XLA may leave out to keep more bits than were asked for.
    near = lax.reduce_precision(x, narrow.nexp, narrow.nmant)
    if narrow.tiny <= wide.tiny:
        return near
    # It makes zeros of subnormal numbers, which are multiples of the smallest.
    unit = float(narrow.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(narrow.tiny), jnp.round(x / unit) * unit, near)
