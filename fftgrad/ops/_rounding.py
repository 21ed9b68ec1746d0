"""Rounding: to the nearest, by chance, with saturation; and sums that keep what it drops."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.ops import _codes, _positions
from fftgrad.ops._shapes import PyTree


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


def narrowed(mean: PyTree, like: PyTree) -> tuple[PyTree, PyTree | None]:
    """The mean in the dtypes of the leaves, and what rounding drops of it, if any is narrow."""
    if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(like)):
        return mean, None
    near = jax.tree.map(lambda m, g: rounded(m, g.dtype), mean, like)
    cast = jax.tree.map(lambda m, g: m.astype(g.dtype), near, like)
    return cast, jax.tree.map(jnp.subtract, mean, near)


def to_bfloat16(x: jax.Array, draws: jax.Array) -> jax.Array:
    """float32 values in bfloat16: up with a chance of the rest, so that they are right on average.

    `draws` are random bits, uint32, of which 16 count. What lies beyond the largest bfloat16 is cut
    to it, and what is not finite stays so.
    """
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    # The next bfloat16 away from zero is 2**16 further, in every binade and below the smallest.
    moved = raw + (draws >> 16)
    beyond = ((moved >> 23) & 255) == 255
    cut = jnp.where(beyond, raw, moved) >> 16
    near = lax.bitcast_convert_type(cut.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(x), jnp.nan, near)


def saturating_cast(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`x` in a narrower dtype, and how many of its values are beyond the range of that.

    Finite values stay finite; infinities and NaN stay what they are, for the exchange to see.
    """
    largest = float(jnp.finfo(dtype).max)
    overflow = _positions.count(*_codes.pack_masks(jnp.abs(x.astype(jnp.float32)) > largest))
    bounded = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    # Rounded before: XLA may leave out a cast whose result is cast back.
    return rounded(bounded.astype(jnp.float32), dtype).astype(dtype), overflow


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both parts of a + b: as it is rounded, and what that drops."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
