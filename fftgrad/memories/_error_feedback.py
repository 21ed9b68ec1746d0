"""Error feedback."""

from typing import Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp

from fftgrad._contracts import Memory, PyTree
from fftgrad._values import value
from fftgrad.memories import _narrow
from fftgrad.memories._narrow import NarrowState

Dtype = Literal["float32", "bfloat16"]


class ErrorFeedbackState(NamedTuple):
    """State: what earlier steps could not send, float32, shaped like the gradient."""

    residual: PyTree


State = ErrorFeedbackState | NarrowState


@value
class ErrorFeedback(Memory):
    """Memory: add to each gradient what earlier steps could not send.

    With e the residual, per worker and leaf, d the decay and u the uptake:

        x = d e + g,   e' = (1 - u) d e + u (x - sent(x)),   e_0 = 0.

    For d = u = 1 that is plain feedback, e' = x - sent(x), and nothing is ever lost. Feedback is
    itself a momentum: an optimizer behind it does better without its own (b1 = 0).

    An uptake below 1 is ScaleCom's low-pass filter. It makes the residuals of the workers more
    alike, which is what lets one worker choose the coefficients of all, and damps the noise that a
    large learning rate puts into them. A coefficient that is sent keeps (1 - u) e of its residual.

    In bfloat16 the residual takes half of the memory. It is rounded up or down by chance, because
    to the nearest a gradient below 1/256 of the residual would never get into it. The draws are a
    hash of the position, of how often it was rounded and of the value's own bits, so a run that is
    repeated has the same ones, and workers need no key for theirs to differ.

    Args:
      decay: d, share of the residual that survives a step, 0 <= d <= 1.
      uptake: u, share of each step's error that the residual takes up, 0 < u <= 1. ScaleCom uses
        0.1 for large batches, 1 for the usual ones.
      dtype: "float32", or "bfloat16" for a residual in half of the memory.

    Shapes: residual float32 or bfloat16, shaped like the gradient, on each worker; with bfloat16
      a count as well, int32[].

    Wire: nothing, whatever the dtype: what is exchanged is float32 in any case.

    Claims: for d = 1, Σ mean sent + mean e / u = Σ mean gradient. In bfloat16 that is so in
      expectation only, taking the hash for random: each rounding is unbiased, but up to 2^-7 of a
      value is lost or added by it for good. A step whose mean is not finite leaves the residual as
      it was.

    Raises:
      ValueError: if `decay` is outside [0, 1] or `uptake` outside (0, 1], or `dtype` is neither.

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
    dtype: Dtype = "float32"

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
        if self.dtype not in get_args(Dtype):
            raise ValueError(
                f"ErrorFeedback(dtype): must be one of {get_args(Dtype)}, got {self.dtype!r}; use "
                "'float32', or 'bfloat16' for half of the memory."
            )

    def init(self, like: PyTree) -> State:
        if self.dtype == "bfloat16":
            return _narrow.zeros(like)
        return ErrorFeedbackState(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        )

    def compensate(self, grad: PyTree, state: State) -> tuple[PyTree, State]:
        return jax.tree.map(lambda g, e: g + self.decay * e, grad, _wide(state)), state

    def update(self, x: PyTree, sent: PyTree, mean: PyTree, state: State) -> State:
        def residual(e: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
            if self.uptake == 1.0:  # XLA would still read e, for the sake of its NaNs
                return x - sent
            return (1 - self.uptake) * (self.decay * e) + self.uptake * (x - sent)

        return self._keep(jax.tree.map(residual, _wide(state), x, sent), state)

    def put_back(self, lost: PyTree, state: State) -> State:
        return self._keep(
            jax.tree.map(lambda e, lost: e + self.uptake * lost, _wide(state), lost), state
        )

    def _keep(self, residual: PyTree, state: State) -> State:
        if self.dtype == "bfloat16":
            return _narrow.keep(residual, cast("NarrowState", state).rounds)
        return ErrorFeedbackState(residual)


def _wide(state: State) -> PyTree:
    return jax.tree.map(lambda e: e.astype(jnp.float32), state.residual)
