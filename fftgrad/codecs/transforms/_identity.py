"""The transform that does nothing."""

import jax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Step, Transform
from fftgrad._values import value


@value
class Identity(Transform):
    """Transform: the vector itself, for dense baselines.

    Wire: x dtype[n] -> main dtype[n].

    Claims: summable; unbiased; lossless, bit for bit.

    Example:
      >>> fg.wire_bytes(fg.Identity(), like=jax.ShapeDtypeStruct((100,), "float32"))  # + header
      404
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        return Compressed(Payload(x))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return payload.main
