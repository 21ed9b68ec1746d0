"""The values of one sign, then those of the other."""

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Selector, Step
from fftgrad._values import value


@value
class AlternatingSign(Selector):
    """Selector: keep the positive values in one step, the negative ones in the next.

    What is kept has one sign, so a selector and `MeanMagnitude` behind it can send positions and
    one number. Zeros stand where something is left out, so every value keeps its place.

    Wire: x float32[n] -> main float32[n].

    Claims: biased; not summable: what it drops differs by step.

    Example:
      >>> fg.compress(fg.codecs.AlternatingSign(), jnp.array([1.0, -2.0, 3.0])).main
      Array([1., 0., 3.], dtype=float32)

    References:
      Fang et al., JPDC 133, 2019, arXiv:1808.04357.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        other = jnp.where(jnp.asarray(step.number) % 2 == 0, x < 0, x > 0)
        return Compressed(Payload(jnp.where(other & jnp.isfinite(x), 0.0, x)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return payload.main

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        return jnp.arange(n, dtype=jnp.int32)

    def at(self, x: jax.Array, side: PyTree, step: Step) -> jax.Array:
        raise ValueError(
            "AlternatingSign.at(x): a sign is no set of positions that other workers could use, "
            "got AlternatingSign() where a support is shared; use TopK or ChunkTopK."
        )
