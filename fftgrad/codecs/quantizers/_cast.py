"""A narrower dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import value
from fftgrad.ops._rounding import saturating_cast

DTYPES = (
    "bfloat16",
    "float16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
"""Those that have a sign and whole bytes."""


@value
class Cast(Quantizer):
    """Quantizer: round each value to a narrower floating-point dtype.

    Args:
      dtype: bfloat16, float16, or a float8 dtype; by name or as a dtype.

    Wire: x float32[n] -> main dtype[n]; 2n bytes for bfloat16, because the buffer is bit-cast and
      no collective widens it.

    Claims: biased (rounds to nearest); not summable, because a sum of narrow numbers is rounded
      again. Relative error of a normal value at most 2^-8 for bfloat16, 2^-11 for float16. Finite
      values beyond the range saturate and are counted; NaN stays NaN.

    Example:
      >>> fg.compress(fg.Cast("bfloat16"), jnp.array([1.0, 1.001])).main
      Array([1, 1], dtype=bfloat16)
    """

    dtype: Any

    def __post_init__(self) -> None:
        try:
            name = np.dtype(self.dtype).name
        except TypeError:  # of a name that is none, such as "bf16"
            name = repr(self.dtype)
        if name not in DTYPES:
            raise TypeError(
                f"Cast(dtype): must be a signed floating-point dtype of 8 or 16 bits, one of "
                f"{', '.join(DTYPES)}, got {name}; use Cast('bfloat16')."
            )
        object.__setattr__(self, "dtype", name)  # by name, so that the value prints and hashes

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"Cast.compress(x): must be a real float vector, got {x.dtype}; after Fft use "
                "RangeFloat instead."
            )
        main, overflow = saturating_cast(x, self.dtype)
        return Compressed(Payload(main), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return payload.main.astype(like.dtype)
