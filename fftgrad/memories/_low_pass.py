"""Error feedback through a low-pass filter."""

import dataclasses

import jax
import jax.numpy as jnp

from fftgrad._base import PyTree
from fftgrad.memories._error_feedback import ErrorFeedbackState


@dataclasses.dataclass(frozen=True)
class LowPass:
    """Memory: error feedback whose residual takes up only a share of each step's error.

    With m the residual, per worker and leaf:

        x = m + g,   m' = (1 - beta) m + beta (x - sent(x)) = m + beta (g - sent(x)),   m_0 = 0.

    The filter makes the residuals of the workers more alike, which is what lets one worker choose
    the coefficients of all, and damps the noise that a large learning rate puts into them.

    Args:
      beta: share of the error taken up, 0 < beta <= 1; 1 is plain error feedback. The paper uses
        0.1 for large batches, 1 for the usual ones.

    Shapes: residual float32, shaped like the gradient, on each worker.

    Wire: nothing.

    Claims: for any beta, Σ mean sent + mean m / beta = Σ mean gradient: a coefficient that is sent
      keeps (1 - beta) m of its residual. A step whose mean is not finite leaves m as it was.

    Raises:
      ValueError: if `beta` is outside (0, 1].

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> memory, g = fg.LowPass(beta=0.5), jnp.array([1.0, 2.0])
      >>> x, state = memory.compensate(g, memory.init(g))
      >>> memory.update(x, sent=jnp.array([0.0, 2.0]), mean=x, state=state)[1].residual
      Array([0.5, 0. ], dtype=float32)

    References:
      Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
      Distributed Training", NeurIPS 2020, arXiv:2104.11125.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.beta <= 1.0:
            raise ValueError(
                f"LowPass(beta): must be in (0, 1], got {self.beta}; the paper uses 0.1 for large "
                "batches."
            )

    def init(self, like: PyTree) -> ErrorFeedbackState:
        return ErrorFeedbackState(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        )

    def compensate(
        self, grad: PyTree, state: ErrorFeedbackState
    ) -> tuple[PyTree, ErrorFeedbackState]:
        return jax.tree.map(jnp.add, state.residual, grad), state

    def update(
        self, x: PyTree, sent: PyTree, mean: PyTree, state: ErrorFeedbackState
    ) -> tuple[PyTree, ErrorFeedbackState]:
        def low_pass(m: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
            if self.beta == 1.0:  # XLA would still read m, for the sake of its NaNs
                return x - sent
            return (1 - self.beta) * m + self.beta * (x - sent)

        return mean, ErrorFeedbackState(jax.tree.map(low_pass, state.residual, x, sent))
