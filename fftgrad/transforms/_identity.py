"""The transform that does nothing."""

import dataclasses

import jax

from fftgrad._base import Like, Payload, Rng


@dataclasses.dataclass(frozen=True)
class Identity:
    """Transform: the vector itself, for dense baselines.

    Shapes: x dtype[n] -> main dtype[n], side ().

    Wire: 4n bytes for float32.

    Claims: summable; unbiased; lossless, bit for bit.

    Example:
      >>> import fftgrad as fg
      >>> fg.wire_bytes(fg.Identity(), like=jax.ShapeDtypeStruct((100,), "float32"))  # + header
      408
    """

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        return Payload(x)

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        return payload.main
