"""A vote of each value, without a magnitude."""

import math

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad._values import value
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _finite
from fftgrad.ops.packing import _digits


@value
class Vote(Quantizer):
    """Quantizer: -1, 0 or 1 for each value; what `TopVotes` sends of those that it selects.

    Not public, because it has no place for a NaN: the header of the buffer tells.

    Attributes:
      clip: None for the sign; b for a vote by chance, P(1) = 1/2 + x_i / 2 min(b, max |x|). Zero
        does not vote.
    """

    clip: float | None = None

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("Vote", x)
        up = x > 0
        if self.clip is not None:
            bound = jnp.minimum(_finite.largest(x), self.clip)
            up = _scale.noise(self, step, x.size) < 0.5 + _scale.in_units(x, bound, 0.5)
        digits = jnp.where(x == 0, 1, jnp.where(up, 2, 0)).astype(jnp.uint32)
        return Compressed(Payload(_digits.pack(digits, 3)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return _digits.unpack(payload.main, 3, math.prod(like.shape)).astype(jnp.float32) - 1
