"""Sums whose rounding is not lost."""

import jax


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both parts of a + b: as it is rounded, and what that drops."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
