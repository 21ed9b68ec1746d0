"""Rounding to nearest, stochastic rounding, saturating casts, exact sums, precise products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad.ops import _codes, _positions
from fftgrad.ops._shapes import PyTree


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round float32 values to those of `dtype`, such as bfloat16 or float16.

    The result is float32, so `x - rounded(x, dtype)` is the rounding error of a cast.
    """
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    # A cast to `dtype` and back would not do, because XLA may remove both casts.
    near = lax.reduce_precision(x, narrow.nexp, narrow.nmant)
    if narrow.tiny <= wide.tiny:
        return near
    # reduce_precision flushes subnormal values of `dtype` to zero. These are multiples of `unit`.
    unit = float(narrow.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(narrow.tiny), jnp.round(x / unit) * unit, near)


def narrowed(mean: PyTree, like: PyTree) -> tuple[PyTree, PyTree | None]:
    """Cast the mean to the dtypes of `like`. Also return the error, or None if all are float32."""
    if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(like)):
        return mean, None
    near = jax.tree.map(lambda m, g: rounded(m, g.dtype), mean, like)
    cast = jax.tree.map(lambda m, g: m.astype(g.dtype), near, like)
    return cast, jax.tree.map(jnp.subtract, mean, near)


def to_bfloat16(x: jax.Array, draws: jax.Array) -> jax.Array:
    """Round float32 values stochastically to bfloat16, without bias.

    Only the upper 16 bits of `draws`, random uint32, are used. Values that would round to infinity
    are truncated. Values that are not finite stay infinite or NaN.
    """
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    # The bits of the next bfloat16 away from zero are 2**16 higher, also for subnormal values.
    moved = raw + (draws >> 16)
    beyond = ((moved >> 23) & 255) == 255
    cut = jnp.where(beyond, raw, moved) >> 16
    near = lax.bitcast_convert_type(cut.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(x), jnp.nan, near)


def saturating_cast(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Cast `x` to a narrower dtype, and count the values out of range.

    Finite values saturate. Infinities and NaN are kept, so that the header can report them.
    """
    largest = float(jnp.finfo(dtype).max)
    overflow = _positions.count(*_codes.pack_masks(jnp.abs(x.astype(jnp.float32)) > largest))
    bounded = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    # Round before the cast, because XLA may remove the cast if the result is cast back.
    return rounded(bounded.astype(jnp.float32), dtype).astype(dtype), overflow


def times(a: jax.Array, b: jax.Array | np.ndarray) -> jax.Array:
    """Multiply matrices in full float32 precision; accelerators use fewer bits by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rounded sum a + b, and its rounding error."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
