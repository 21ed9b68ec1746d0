"""A narrower dtype."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._base import Like, Payload, Rng
from fftgrad.packing import _bitmap


@dataclasses.dataclass(frozen=True)
class Cast:
    """Quantizer: round each value to a narrower floating-point dtype.

    Args:
      dtype: bfloat16, float16, or a float8 dtype; by name or as a dtype.

    Shapes: x float32[n] -> main dtype[n], side ().

    Wire: 2n bytes for bfloat16, really: the buffer is bit-cast, so no collective widens it.

    Claims: biased (rounds to nearest); not summable, because a sum of narrow numbers is rounded
      again. Relative error of a normal value at most 2^-8 for bfloat16, 2^-11 for float16. Finite
      values beyond the range saturate and are counted; NaN stays NaN.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype of at most 16 bits; while tracing, if the
        input is not a float vector.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> fg.compress(fg.Cast("bfloat16"), jnp.array([1.0, 1.001])).main
      Array([1, 1], dtype=bfloat16)
    """

    dtype: Any

    def __post_init__(self) -> None:
        name = np.dtype(self.dtype).name
        if not jnp.issubdtype(name, jnp.floating) or np.dtype(name).itemsize > 2:
            raise TypeError(
                f"Cast(dtype): must be a floating-point dtype of at most 16 bits, got {name}; use "
                "Cast('bfloat16')."
            )
        object.__setattr__(self, "dtype", name)  # by name, so that the value prints and hashes

    @property
    def summable(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"Cast.compress(x): must be a real float vector, got {x.dtype}; after Fft use "
                "RangeFloat instead."
            )
        main, overflow = saturating_cast(x, self.dtype)
        return Payload(main, (), overflow)

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        return payload.main.astype(like.dtype)


def saturating_cast(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`x` in a narrower dtype, and how many of its values are beyond the range of that.

    Finite values stay finite; infinities and NaN stay what they are, for the exchange to see.
    """
    largest = float(jnp.finfo(dtype).max)
    overflow = _bitmap.count(*_bitmap.pack(jnp.abs(x.astype(jnp.float32)) > largest))
    bounded = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return bounded.astype(dtype), overflow
