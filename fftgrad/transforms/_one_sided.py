"""The values of one sign, then those of the other."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._base import Like, Payload, Rng


class OneSidedState(NamedTuple):
    """State: how many steps there were."""

    step: jax.Array


@dataclasses.dataclass(frozen=True)
class OneSided:
    """Transform: keep the positive values in one step, the negative ones in the next.

    What is kept has one sign, so a selector and `OneMean` behind it can send positions and one
    number. The rest stays in the memory for the next step.

    Shapes: x float32[n] -> main float32[n], side ().

    Wire: nothing of its own.

    Claims: biased; not summable: what it drops differs by step.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> fg.compress(fg.OneSided(), jnp.array([1.0, -2.0, 3.0])).main
      Array([1., 0., 3.], dtype=float32)

    References:
      Fang et al., "RedSync", JPDC 133, 2019, arXiv:1808.04357.
    """

    @property
    def summable(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    def init(self, like: Like) -> OneSidedState:
        return OneSidedState(jnp.zeros((), jnp.int32))

    def adapt(
        self, x: jax.Array, state: OneSidedState, rng: Rng | None
    ) -> tuple[Payload, OneSidedState]:
        other = jnp.where(state.step % 2 == 0, x < 0, x > 0)
        kept = jnp.where(other & jnp.isfinite(x), 0.0, x)
        return Payload(kept), OneSidedState(state.step + 1)

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        return self.adapt(x, self.init(x), rng)[0]

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        return payload.main
