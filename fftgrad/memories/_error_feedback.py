"""Error feedback."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._base import PyTree


class ErrorFeedbackState(NamedTuple):
    """State: what earlier steps could not send, float32, shaped like the gradient."""

    residual: PyTree


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """Memory: add to each gradient what earlier steps could not send.

    With e the residual, per worker and leaf:

        x = decay · e + g,   e' = x - sent(x),   e_0 = 0.

    For decay 1 nothing is ever lost: Σ mean applied + mean residual = Σ mean gradient. Feedback is
    itself a momentum: an optimizer behind it does better without its own (b1 = 0).

    Args:
      decay: share of the residual that survives a step, 0 <= decay <= 1.

    Shapes: residual float32, shaped like the gradient, on each worker.

    Wire: nothing.

    Claims: the telescoping sum above, for decay 1. A step whose mean is not finite leaves the
      residual as it was.

    Raises:
      ValueError: if `decay` is outside [0, 1].

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> memory = fg.ErrorFeedback()
      >>> g = jnp.array([1.0, 2.0])
      >>> x, state = memory.compensate(g, memory.init(g))
      >>> memory.update(x, sent=jnp.array([0.0, 2.0]), mean=x, state=state)[1].residual
      Array([1., 0.], dtype=float32)

    References:
      Seide et al., Interspeech 2014. Stich et al., NeurIPS 2018, arXiv:1809.07599. Karimireddy et
      al., ICML 2019, arXiv:1901.09847.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(
                f"ErrorFeedback(decay): must be in [0, 1], got {self.decay}; use 1.0 to lose "
                "nothing, 0.95 in front of Adam."
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
        self,
        x: PyTree,
        sent: PyTree,
        mean: PyTree,
        state: ErrorFeedbackState,
    ) -> tuple[PyTree, ErrorFeedbackState]:
        return mean, ErrorFeedbackState(jax.tree.map(jnp.subtract, x, sent))
