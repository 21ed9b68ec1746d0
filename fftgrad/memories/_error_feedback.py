"""Error feedback."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Memory, PyTree
from fftgrad._values import constructor_call


class ErrorFeedbackState(NamedTuple):
    """State: what earlier steps could not send, float32, shaped like the gradient."""

    residual: PyTree


@dataclasses.dataclass(frozen=True, repr=False)
class ErrorFeedback(Memory):
    """Memory: add to each gradient what earlier steps could not send.

    With e the residual, per worker and leaf, d the decay and u the uptake:

        x = d e + g,   e' = (1 - u) d e + u (x - sent(x)),   e_0 = 0.

    For d = u = 1 that is plain feedback, e' = x - sent(x), and nothing is ever lost. Feedback is
    itself a momentum: an optimizer behind it does better without its own (b1 = 0).

    An uptake below 1 is ScaleCom's low-pass filter. It makes the residuals of the workers more
    alike, which is what lets one worker choose the coefficients of all, and damps the noise that a
    large learning rate puts into them. A coefficient that is sent keeps (1 - u) e of its residual.

    Args:
      decay: d, share of the residual that survives a step, 0 <= d <= 1.
      uptake: u, share of each step's error that the residual takes up, 0 < u <= 1. ScaleCom uses
        0.1 for large batches, 1 for the usual ones.

    Shapes: residual float32, shaped like the gradient, on each worker.

    Wire: nothing.

    Claims: for d = 1, Σ mean sent + mean e / u = Σ mean gradient. A step whose mean is not finite
      leaves the residual as it was.

    Raises:
      ValueError: if `decay` is outside [0, 1] or `uptake` outside (0, 1].

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> memory = fg.ErrorFeedback()
      >>> g = jnp.array([1.0, 2.0])
      >>> x, state = memory.compensate(g, memory.init(g))
      >>> memory.update(x, sent=jnp.array([0.0, 2.0]), mean=x, state=state).residual
      Array([1., 0.], dtype=float32)

    References:
      Seide et al., Interspeech 2014. Stich et al., NeurIPS 2018, arXiv:1809.07599. Karimireddy et
      al., ICML 2019, arXiv:1901.09847. Chen et al., "ScaleCom: Scalable Sparsified Gradient
      Compression for Communication-Efficient Distributed Training", NeurIPS 2020,
      arXiv:2104.11125.
    """

    decay: float = 1.0
    uptake: float = 1.0

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(
                f"ErrorFeedback(decay): must be in [0, 1], got {self.decay}; use 1.0 to lose "
                "nothing, 0.95 in front of Adam."
            )
        if not 0.0 < self.uptake <= 1.0:
            raise ValueError(
                f"ErrorFeedback(uptake): must be in (0, 1], got {self.uptake}; use 1.0, or 0.1 for "
                "large batches."
            )

    def init(self, like: PyTree) -> ErrorFeedbackState:
        return ErrorFeedbackState(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        )

    def compensate(
        self, grad: PyTree, state: ErrorFeedbackState
    ) -> tuple[PyTree, ErrorFeedbackState]:
        return jax.tree.map(lambda g, e: g + self.decay * e, grad, state.residual), state

    def update(
        self, x: PyTree, sent: PyTree, mean: PyTree, state: ErrorFeedbackState
    ) -> ErrorFeedbackState:
        def residual(e: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
            if self.uptake == 1.0:  # XLA would still read e, for the sake of its NaNs
                return x - sent
            return (1 - self.uptake) * (self.decay * e) + self.uptake * (x - sent)

        return ErrorFeedbackState(jax.tree.map(residual, state.residual, x, sent))

    def put_back(self, lost: PyTree, state: ErrorFeedbackState) -> ErrorFeedbackState:
        return ErrorFeedbackState(
            jax.tree.map(lambda e, lost: e + self.uptake * lost, state.residual, lost)
        )
