"""Whether values are finite: the one way to find out.

A maximum is no evidence. XLA for CPUs may drop a NaN from a vectorized `max` or `min`, so a check
that leans on them passes in small tests and fails at real sizes. A sum propagates NaN everywhere.
"""

import jax
import jax.numpy as jnp


def all_finite(tree: object) -> jax.Array:
    """Whether every value of every array is finite, bool[]."""
    flags = [jnp.isfinite(poison(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), bool)


def poison(x: jax.Array, axis: int | None = None) -> jax.Array:
    """0.0 if all values of `x` are finite, else NaN; of each row if `axis` is given.

    Added to a scale, or to what stands for all values, it makes a bad value visible.
    """
    # A number less itself is zero, anything else NaN. The sum takes one pass, where XLA for CPUs
    # writes out an array of booleans before it reduces it.
    zeros = x - x
    if jnp.issubdtype(zeros.dtype, jnp.complexfloating):
        zeros = zeros.real + zeros.imag
    return jnp.sum(zeros, axis=axis)


def largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude, or NaN if anything is not finite; of each row if `axis` is given."""
    # No NaN takes part in the maximum.
    top = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=axis)
    return jnp.where(top == jnp.inf, jnp.nan, top)


def poison_unless(finite: jax.Array) -> jax.Array:
    """0.0 where the flag holds, else NaN."""
    return jnp.where(finite, 0.0, jnp.nan)
