"""Casts that keep finite values finite."""

from typing import Any

import jax
import jax.numpy as jnp

from fftgrad.ops.packing import _bitmap


def saturating_cast(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`x` in a narrower dtype, and how many of its values are beyond the range of that.

    Finite values stay finite; infinities and NaN stay what they are, for the exchange to see.
    """
    largest = float(jnp.finfo(dtype).max)
    overflow = _bitmap.count(*_bitmap.pack(jnp.abs(x.astype(jnp.float32)) > largest))
    bounded = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return bounded.astype(dtype), overflow
