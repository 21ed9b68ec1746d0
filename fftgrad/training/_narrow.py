"""A mean in the dtypes of the gradient, and what rounding to them drops."""

import jax
import jax.numpy as jnp

from fftgrad._contracts import PyTree
from fftgrad.ops import _rounding


def narrowed(mean: PyTree, like: PyTree) -> tuple[PyTree, PyTree | None]:
    """The mean in the dtypes of the leaves, and what rounding drops of it, if any is narrow."""
    if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(like)):
        return mean, None
    near = jax.tree.map(lambda m, g: _rounding.rounded(m, g.dtype), mean, like)
    cast = jax.tree.map(lambda m, g: m.astype(g.dtype), near, like)
    return cast, jax.tree.map(jnp.subtract, mean, near)
