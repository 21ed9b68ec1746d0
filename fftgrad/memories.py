"""Memories: values that a worker keeps to send in later steps. May import the contracts."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fftgrad._contracts import Memory, PyTree
from fftgrad._values import check_choice, check_within, value
from fftgrad.ops import _random, _rounding

__all__ = ["ErrorFeedback", "Memory", "MomentumCorrection", "NoMemory"]

Dtype = Literal["float32", "bfloat16"]


class ErrorFeedbackState(NamedTuple):
    """State of `ErrorFeedback`."""

    residual: PyTree  # unsent values of earlier steps, shaped like the gradient
    # number of roundings to bfloat16, int32[], a seed of the next rounding; None for float32
    rounds: jax.Array | None = None


@value
class ErrorFeedback(Memory):
    """Memory: add the unsent values of earlier steps to each gradient.

    With e the residual, per worker and leaf, d the decay and u the beta:

        x = d e + g,   e' = (1 - u) d e + u (x - sent(x)),   e_0 = 0.

    For d = u = 1 this is plain error feedback, e' = x - sent(x), which loses no value.
    Error feedback delays gradients, as momentum does. So use an optimizer without momentum, or one
    that adds the new gradient to the momentum, such as `fg.optimizers.feedback_adam`.

    A beta below 1 is ScaleCom's low-pass filter. The residuals of the workers become more similar,
    as `LeaderTopK` needs. The filter also damps the noise of a large learning rate. The residual of
    a coefficient that is sent becomes (1 - u) d e instead of zero.

    A bfloat16 residual is rounded stochastically, because rounding to nearest would lose gradients
    below 1/256 of the residual. The random bits are a hash of the position, the number of
    roundings and the value, so rounding is reproducible.

    Args:
      decay: d, share of the residual that survives a step, 0 <= d <= 1.
      beta: u, weight of a step's error in the residual, 0 < u <= 1. ScaleCom uses 0.1 for large
        batches and 1 otherwise.
      dtype: dtype of the residual, "float32" or "bfloat16".

    Shapes: residual float32 or bfloat16, shaped like the gradient, on each worker; with bfloat16
      also a count, int32[].

    Claims: for d = 1 no value is lost. With sums Σ over steps, means over workers, and the last
      residual e, (Σ mean sent) + (mean e) / u = Σ mean gradient. In bfloat16 this holds in
      expectation; each rounding changes a residual by up to 2^-7 of itself.

    Example:
      >>> memory, g = fg.ErrorFeedback(), jnp.array([1.0, 2.0])
      >>> x, state = memory.add(g, memory.init(g))
      >>> memory.update(x, error=jnp.array([1.0, 0.0]), mean=x, state=state).residual
      Array([1., 0.], dtype=float32)

    References:
      Seide et al., Interspeech 2014. Stich et al., NeurIPS 2018, arXiv:1809.07599. Karimireddy et
      al., ICML 2019, arXiv:1901.09847. Chen et al., NeurIPS 2020, arXiv:2104.11125 (ScaleCom).
    """

    decay: float = 1.0
    beta: float = 1.0
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_within("ErrorFeedback(decay)", self.decay, "[0, 1]", "use 1.0, which loses nothing.")
        check_within("ErrorFeedback(beta)", self.beta, "(0, 1]", "use 1.0; 0.1 for large batches.")
        check_choice("ErrorFeedback(dtype)", self.dtype, get_args(Dtype))

    def init(self, like: PyTree) -> ErrorFeedbackState:
        residual = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, self.dtype), like)
        rounds = jnp.zeros((), jnp.int32) if self.dtype == "bfloat16" else None
        return ErrorFeedbackState(residual, rounds)

    def add(self, grad: PyTree, state: ErrorFeedbackState) -> tuple[PyTree, ErrorFeedbackState]:
        return jax.tree.map(lambda g, e: g + self.decay * e, grad, _wide(state)), state

    def update(
        self, x: PyTree, error: PyTree, mean: PyTree, state: ErrorFeedbackState
    ) -> ErrorFeedbackState:
        def residual(e: jax.Array, error: jax.Array) -> jax.Array:
            if self.beta == 1.0:  # avoids a read of e: XLA keeps 0 * e, because e may be NaN
                return error
            return (1 - self.beta) * (self.decay * e) + self.beta * error

        return _kept(jax.tree.map(residual, _wide(state), error), state.rounds)

    def restore(self, lost: PyTree, state: ErrorFeedbackState) -> ErrorFeedbackState:
        more = jax.tree.map(lambda e, lost: e + self.beta * lost, _wide(state), lost)
        return _kept(more, state.rounds)


def _wide(state: ErrorFeedbackState) -> PyTree:
    return jax.tree.map(lambda e: e.astype(jnp.float32), state.residual)


def _kept(residual: PyTree, rounds: jax.Array | None) -> ErrorFeedbackState:
    """Make the state from a float32 residual; round it stochastically if the state is bfloat16."""
    if rounds is None:
        return ErrorFeedbackState(residual)
    (seed,) = _random.bits(rounds.astype(jnp.uint32), jnp.uint32(0), 1)

    def one(x: jax.Array) -> jax.Array:
        flat = x.ravel()
        # Hash the values too, because positions are equal in all leaves and on all workers.
        own = seed ^ jax.lax.bitcast_convert_type(flat, jnp.uint32)
        draws = _random.bits(jnp.uint32(0), own, x.size)
        return _rounding.to_bfloat16(flat, draws).reshape(x.shape)

    return ErrorFeedbackState(jax.tree.map(one, residual), rounds + 1)


@value
class NoMemory(Memory):
    """Memory: keeps nothing. Unsent values are lost, as in the FFT paper (arXiv:1811.08596).

    Example:
      >>> fg.NoMemory().init(None)
      ()
    """

    def update(self, x: PyTree, error: PyTree, mean: PyTree, state: PyTree) -> PyTree:
        return state


class MomentumCorrectionState(NamedTuple):
    """State of `MomentumCorrection`: velocity and residual, float32, shaped like the gradient."""

    velocity: PyTree
    residual: PyTree


@value
class MomentumCorrection(Memory):
    """Memory: accumulate velocities in place of gradients; reset a velocity when it is sent.

    With g the gradient, u the velocity and v the residual, per worker and leaf:

        plain      u' = m u + g,       x = v + u'
        Nesterov   u' = m (u + g),     x = v + u' + g
        then       v' = x - sent(x),   u'' = u' where nothing was sent, else 0 (factor masking).

    Use it only if the codec sends zero for most values. With a transform such as `Fft`, masking
    resets all velocities.

    The momentum acts before the compression, so use an optimizer without momentum. If all non-zero
    values of a leaf are sent, the leaf keeps its velocity. So dense leaves and a dense warm-up have
    ordinary momentum. This also holds for a leaf with few non-zero values. Its parameters then move
    up to 1 / (1 - m) times as far as with masking.

    Args:
      momentum: m, 0 <= m < 1.
      nesterov: True for Nesterov momentum.

    Shapes: velocity and residual float32, shaped like the gradient, on each worker.

    Differs from the paper: the residual keeps the quantization error of a value that is sent.

    Example:
      >>> memory, g = fg.memories.MomentumCorrection(momentum=0.5), jnp.array([1.0, 2.0])
      >>> x, state = memory.add(g, memory.init(g))
      >>> state = memory.update(x, error=x * jnp.array([1.0, 0.0]), mean=x, state=state)
      >>> state.velocity, memory.add(g, state)[0]
      (Array([1., 0.], dtype=float32), Array([2.5, 2. ], dtype=float32))

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887 (DGC). Fang et al., JPDC 133, 2019, arXiv:1808.04357.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        remedy = "use 0.9, or ErrorFeedback() for none."
        check_within("MomentumCorrection(momentum)", self.momentum, "[0, 1)", remedy)

    def init(self, like: PyTree) -> MomentumCorrectionState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        return MomentumCorrectionState(zeros, jax.tree.map(jnp.copy, zeros))

    def add(
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
        return MomentumCorrectionState(jax.tree.map(_mask, state.velocity, x, error), error)

    def restore(self, lost: PyTree, state: MomentumCorrectionState) -> MomentumCorrectionState:
        return state._replace(residual=jax.tree.map(jnp.add, state.residual, lost))


def _mask(velocity: jax.Array, x: jax.Array, error: jax.Array) -> jax.Array:
    whole = jnp.all(error == 0)
    return jnp.where((error == x) | whole, velocity, 0.0)
