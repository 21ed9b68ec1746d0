"""What quantizers with a scale share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Step
from fftgrad.ops import _finite, _hash

TINY = np.float32(np.finfo(np.float32).tiny)


def check_real(owner: str, x: jax.Array) -> None:
    """Refuses what is not a float32 vector."""
    if x.ndim != 1 or x.dtype != jnp.float32:
        raise ValueError(
            f"{owner}.compress(x): must be a float32 vector, got {x.dtype}{list(x.shape)}; after "
            "Fft use RangeFloat instead."
        )


def divisor(scale: jax.Array) -> jax.Array:
    """`scale`, or 1 where it is zero or so small that its inverse is not finite."""
    return jnp.where(scale < TINY, 1.0, scale)


def in_units(x: jax.Array, scale: jax.Array, per_scale: float) -> jax.Array:
    """X · per_scale / scale, also where 1 / scale is so small that it is flushed to zero."""
    down = jnp.where(scale > 1.0, np.float32(1 / 16), np.float32(1.0))
    # Kept: each value would find them again, with a root and a division.
    down, factor = lax.optimization_barrier((down, per_scale / (divisor(scale) * down)))
    return (x * down) * factor


def norms(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest magnitude and the length of each row; no square overflows.

    Both are NaN where a row is not finite.
    """
    top = _finite.largest(rows, axis=1)
    scaled = in_units(rows, top[:, None], 1.0)
    return top, divisor(top) * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=1))


def noise(owner: object, step: Step, count: int) -> jax.Array:
    """Uniform float32[count] in [0, 1), another for each worker."""
    return (noise_bits(owner, step, count) >> 8).astype(jnp.float32) * 2.0**-24


def noise_bits(owner: object, step: Step, count: int) -> jax.Array:
    """Random bits uint32[count], others for each worker."""
    return _hash.drawn_bits(owner, step.local, count, ", with another key for each call")


def to_levels(x: jax.Array, scale: jax.Array, levels: int, uniform: jax.Array) -> jax.Array:
    """Integers in -levels ... levels that stand for `x` in units of scale / levels.

    Rounded up or down by chance, right on average for |x| <= scale.
    """
    share = in_units(x, scale, levels)
    down = jnp.floor(share)
    # The largest may come out a bit above its scale.
    return jnp.clip(down + (uniform < share - down).astype(jnp.float32), -levels, levels)
