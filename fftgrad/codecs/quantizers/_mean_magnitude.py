"""One value for all."""

import dataclasses

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Quantizer, Step
from fftgrad.codecs.quantizers import _scale
from fftgrad.ops import _finite


@dataclasses.dataclass(frozen=True)
class MeanMagnitude(Quantizer):
    """Quantizer: the mean of the values that are not zero, for each of them.

    Meant for values of one sign, as `AlternatingSign` and `Threshold` leave them: positions and a
    single number travel. All values become the mean, zeros among them too, so it goes behind a
    selector that keeps none.

    Shapes: x float32[k] -> main float32[1], side ().

    Wire: 4 bytes.

    Claims: biased; not summable.

    Raises:
      ValueError: while tracing, if the input is not a float32 vector.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> fg.compress(fg.codecs.MeanMagnitude(), jnp.array([1.0, 3.0, 0.0])).main
      Array([2.], dtype=float32)

    References:
      Fang et al., "RedSync", JPDC 133, 2019, arXiv:1808.04357.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _scale.check_real("MeanMagnitude", x)
        count = jnp.maximum(jnp.sum((x != 0).astype(jnp.float32)), 1.0)
        return Compressed(Payload(_finite.mean(x, count)[None]))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return jnp.broadcast_to(payload.main, like.shape)
