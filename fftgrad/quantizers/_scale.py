"""What quantizers with a scale share."""

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad import _hash
from fftgrad._base import Rng

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


def norms(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest magnitude and the length of each row; no square overflows."""
    top = jnp.max(jnp.abs(rows), axis=1)
    scaled = rows * (1 / divisor(top))[:, None]
    return top, divisor(top) * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=1))


def noise(owner: object, rng: Rng | None, count: int) -> jax.Array:
    """Uniform float32[count] in [0, 1), another for each worker."""
    if rng is None:
        raise ValueError(
            f"{owner!r}.compress(rng): rounding draws, got None; pass rng=fg.Rng.of(key), with "
            "another key for each call."
        )
    return (_hash.keyed_bits(rng.local, count) >> 8).astype(jnp.float32) * 2.0**-24


def to_levels(x: jax.Array, scale: jax.Array, levels: int, uniform: jax.Array) -> jax.Array:
    """Integers in -levels ... levels that stand for `x` in units of scale / levels.

    Rounded up or down by chance, right on average for |x| <= scale.
    """
    share = x * (levels / divisor(scale))
    down = jnp.floor(share)
    # The largest may come out a bit above its scale.
    return jnp.clip(down + (uniform < share - down).astype(jnp.float32), -levels, levels)
