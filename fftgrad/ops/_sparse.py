"""A vector that is zero but at some positions."""

from typing import Any, NamedTuple

import jax

IN_ORDER: dict[str, Any] = {"indices_are_sorted": True, "unique_indices": True, "mode": "drop"}
"""How positions index a vector: what lets XLA scatter without contention."""


class Sparse(NamedTuple):
    """Value: a vector that is zero but at some positions; what `Selector.sparse` returns.

    Attributes:
      positions: int32, of any shape; flat, they ascend and differ, all of them. What is nowhere has
        n, n + 1, ...
      values: what is there, of the same shape.

    Example:
      >>> few = fg.codecs.Sparse(jnp.array([0, 2]), jnp.array([1.0, -1.0]))
      >>> few.add_to(jnp.ones(3), scale=2.0)
      Array([ 3.,  1., -1.], dtype=float32)
    """

    positions: jax.Array
    values: jax.Array

    def put_into(self, x: jax.Array) -> jax.Array:
        """`x` with the values in place of what it has there."""
        return x.at[self.positions].set(self.values, **IN_ORDER)

    def add_to(self, x: jax.Array, scale: jax.Array | float) -> jax.Array:
        """`x` + scale · this."""
        return x.at[self.positions].add(scale * self.values, **IN_ORDER)
