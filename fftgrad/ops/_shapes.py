"""Shapes and dtypes."""

from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any
"""A nest of containers with arrays (or shapes) at its leaves."""

Like: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""Anything that has a shape and a dtype."""


def spec(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
