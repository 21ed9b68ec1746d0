"""What is computed once, whoever reads it."""

import jax
import jax.numpy as jnp
from jax import lax


def kept(words: jax.Array) -> jax.Array:
    """The same words, uint32[...], which all their readers find in memory.

    Left to itself a compiler computes cheap things again for each reader, with other kernels around
    them, and so with other roundings; XLA for a CPU drops an optimization barrier before that. It
    does not look into a loop: this one flips all bits, twice.
    """
    return lax.fori_loop(0, 2, lambda _, bits: bits ^ jnp.uint32(0xFFFFFFFF), words)
