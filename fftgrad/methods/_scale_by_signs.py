"""Optimizers of signs: majority vote and 1-bit Adam."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes, codecs, exchanges
from fftgrad._contracts import AxisName, PyTree
from fftgrad._values import check_count
from fftgrad.memories import ErrorFeedback
from fftgrad.ops import _count
from fftgrad.training._gradients import ONE_VOTE, refuse_weight, weighted
from fftgrad.training._pmean import compressed_pmean


def scale_by_majority_vote(
    *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Method: each worker votes with one bit on the sign of each parameter's update.

        update = sign(Σ_i sign(g_i)),   0 in a tie.

    Args:
      axis_name: the axis of the workers.

    Returns:
      An optax transformation whose updates are -1, 0 and 1. Chain `optax.scale(-lr)` after it.

    Wire: 1 bit per value and 8 bytes in total.

    Claims: biased; no memory. A gradient of zero votes +1, because one bit cannot encode zero.

    Differs from the paper: there is no server. Each worker gathers all votes and counts them.

    Raises:
      ValueError: while tracing, if `update` gets a `weight`.

    Example:
      >>> import optax
      >>> tx = optax.chain(fg.methods.scale_by_majority_vote(), optax.sgd(1e-3))

    References:
      Bernstein et al., ICLR 2019, arXiv:1810.05291.
    """

    def vote(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        del params
        refuse_weight("scale_by_majority_vote", extra.get("weight"), *ONE_VOTE)
        # Zeros vote +1, so that all magnitudes are 1. g - g makes the vote NaN if g is not finite.
        own = jax.tree.map(lambda g: jnp.where(g < 0, -1.0, 1.0).astype(g.dtype) + (g - g), updates)
        return own, state

    def count(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params
        # Without rounding, the mean of a tie is 0 and any other mean is at least 1 / workers.
        tie = 0.5 / _axes.size(axis_name)
        return jax.tree.map(lambda m: jnp.where(jnp.abs(m) < tie, 0, jnp.sign(m)), updates)

    return optax.with_extra_args_support(
        optax.chain(
            optax.GradientTransformationExtraArgs(optax.init_empty_state, vote),
            compressed_pmean(exchanges.AllGather(codecs.Sign()), axis_name=axis_name),
            optax.stateless(count),
        )
    )


class OneBitAdamState(NamedTuple):
    """State of `scale_by_one_bit_adam`: moments, equal on all workers, and two exchanges."""

    step: jax.Array
    mu: PyTree
    nu: PyTree
    dense: Any
    compressed: Any


def scale_by_one_bit_adam(
    warm_up_steps: int,
    workers: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Method: Adam for T steps, then Adam with a fixed second moment and a momentum of one bit.

    During T warm-up steps, this is Adam on dense gradients. After that, the second moment stays
    v_T, and only the momentum is exchanged, in `TwoStage` with error feedback in both stages:

        m_i = b1 m + (1 - b1) g_i,   m' = two-stage mean of 1-bit (m_i + error),   update m' / √v_T.

    Args:
      warm_up_steps: T, at least 1; the paper's BERT uses 23,000 of 118,000 steps.
      workers: number of workers.
      b1: decay of the momentum.
      b2: decay of the second moment.
      eps: added to √v.
      axis_name: the axis of the workers.

    Returns:
      A transformation to replace `optax.scale_by_adam`. Chain `optax.scale(-lr)` after it.

    Wire: 4 bytes per value and step during warm-up, then 1 bit per value in each of two stages.

    Claims: both stages have error feedback. The update of a bad step is not finite; the moments
      stay unchanged.

    Differs from the paper: each shard of a part has its own magnitude; the paper has one in all.
      Adam's bias correction continues for m and stays fixed for v, so the step size does not jump.

    Example:
      >>> import optax
      >>> tx = optax.chain(fg.methods.scale_by_one_bit_adam(1000, workers=8), optax.scale(-1e-3))

    References:
      Tang et al., ICML 2021, arXiv:2102.02888.
    """
    check_count("scale_by_one_bit_adam(warm_up_steps)", warm_up_steps, "use a tenth of training.")
    dense: Any = compressed_pmean(exchanges.AllReduce(), axis_name=axis_name)
    compressed: Any = compressed_pmean(
        exchanges.TwoStage(codecs.Sign(), workers=workers), ErrorFeedback(), axis_name=axis_name
    )

    def init(params: optax.Params) -> OneBitAdamState:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return OneBitAdamState(
            step=jnp.zeros((), jnp.int32),
            mu=zeros,
            nu=jax.tree.map(jnp.copy, zeros),
            dense=dense.init(params),
            compressed=compressed.init(params),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        del params
        grads: Any = optax.tree.cast(updates, jnp.float32)
        # Weight the gradients, not the momentum: its old value is equal on all workers.
        grads = weighted(grads, extra.get("weight"), axis_name)

        def warm_up(grads: PyTree, state: OneBitAdamState) -> Any:
            mean, inner = dense.update(grads, state.dense)
            moments = (
                _decayed(state.mu, mean, b1),
                _decayed(state.nu, jax.tree.map(jnp.square, mean), b2),
            )
            return moments, state._replace(dense=inner), inner.skipped == state.dense.skipped

        def one_bit(grads: PyTree, state: OneBitAdamState) -> Any:
            mu, inner = compressed.update(_decayed(state.mu, grads, b1), state.compressed)
            fine = inner.skipped == state.compressed.skipped
            return (mu, state.nu), state._replace(compressed=inner), fine

        (mu, nu), state, fine = lax.cond(state.step < warm_up_steps, warm_up, one_bit, grads, state)
        count = _count.next_step(state.step)
        first = 1 - b1 ** count.astype(jnp.float32)
        second = 1 - b2 ** jnp.minimum(count, warm_up_steps).astype(jnp.float32)

        def step(m: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            return (m / first / (jnp.sqrt(v / second) + eps)).astype(g.dtype)

        # A bad step changes neither the moments nor the count of steps.
        kept_mu, kept_nu = optax.tree.where(fine, (mu, nu), (state.mu, state.nu))
        kept = jnp.where(fine, count, state.step)
        state = state._replace(step=kept, mu=kept_mu, nu=kept_nu)
        return jax.tree.map(step, mu, nu, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _decayed(old: PyTree, new: PyTree, decay: float) -> PyTree:
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)
