"""Momentum on each worker, before the residual."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Memory, PyTree
from fftgrad._values import check_within, value


class MomentumCorrectionState(NamedTuple):
    """State: velocity and residual, float32, shaped like the gradient."""

    velocity: PyTree
    residual: PyTree


@value
class MomentumCorrection(Memory):
    """Memory: accumulate the velocity instead of the gradient, and forget it where it was sent.

    With u the velocity and v the residual, per worker and leaf:

        plain      u' = m u + g,       x = v + u'
        Nesterov   u' = m (u + g),     x = v + u' + g
        then       v' = x - sent(x),   u'' = u' where nothing was sent, else 0 (factor masking).

    It is the optimizer's momentum, moved to before the compression: the optimizer behind it must
    have none. A leaf that is sent whole keeps its velocity, so dense leaves and a dense warm-up
    have ordinary momentum. So does a leaf with no more non-zero values than are sent: a gradient
    that sparse moves up to 1 / (1 - m) times further than where masking takes hold.

    Args:
      momentum: m, 0 <= m < 1.
      nesterov: whether the momentum is Nesterov's.
      masking: whether to forget the velocity where a coefficient was sent. It needs a codec that
        leaves most values exactly zero; behind a transform such as `Fft` it would forget all.

    Shapes: velocity and residual float32, shaped like the gradient, on each worker.

    Claims: without masking and for plain momentum, Σ mean applied + mean v = Σ mean velocity. A
      step whose mean is not finite leaves both as they were.

    Differs from the paper: what quantization takes from a value that was sent stays in the
      residual, which the papers clear there.

    Example:
      >>> memory, g = fg.MomentumCorrection(momentum=0.5), jnp.array([1.0, 2.0])
      >>> x, state = memory.compensate(g, memory.init(g))
      >>> state = memory.update(x, error=x * jnp.array([1.0, 0.0]), mean=x, state=state)
      >>> state.velocity, memory.compensate(g, state)[0]
      (Array([1., 0.], dtype=float32), Array([2.5, 2. ], dtype=float32))

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887 (DGC). Fang et al., JPDC 133, 2019, arXiv:1808.04357.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        remedy = "use 0.9, or ErrorFeedback() for none."
        check_within("MomentumCorrection(momentum)", self.momentum, "[0, 1)", remedy)

    def init(self, like: PyTree) -> MomentumCorrectionState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        return MomentumCorrectionState(zeros, jax.tree.map(jnp.copy, zeros))

    def compensate(
        self, grad: PyTree, state: MomentumCorrectionState
    ) -> tuple[PyTree, MomentumCorrectionState]:
        def accelerate(u: jax.Array, g: jax.Array) -> jax.Array:
            return self.momentum * (u + g) if self.nesterov else self.momentum * u + g

        velocity = jax.tree.map(accelerate, state.velocity, grad)
        x = jax.tree.map(jnp.add, state.residual, velocity)
        if self.nesterov:
            x = jax.tree.map(jnp.add, x, grad)
        return x, state._replace(velocity=velocity)

    def update(
        self, x: PyTree, error: PyTree, mean: PyTree, state: MomentumCorrectionState
    ) -> MomentumCorrectionState:
        velocity = state.velocity
        if self.masking:
            velocity = jax.tree.map(_mask, velocity, x, error)
        return MomentumCorrectionState(velocity, error)

    def put_back(self, lost: PyTree, state: MomentumCorrectionState) -> MomentumCorrectionState:
        return state._replace(residual=jax.tree.map(jnp.add, state.residual, lost))


def _mask(velocity: jax.Array, x: jax.Array, error: jax.Array) -> jax.Array:
    whole = jnp.all(error == 0)
    return jnp.where((error == x) | whole, velocity, 0.0)
