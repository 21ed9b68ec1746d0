"""One update for several gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import PyTree
from fftgrad._values import check_count, check_transformation
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.ops import _count, _rounding
from fftgrad.training._weigh import refuse_weight


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
      step: how many gradients there were, int32, equal on all workers.
      total: the mean so far of each worker's own, float32, and what rounding dropped of the last.
      inner: the inner transformation's state.
    """

    step: jax.Array
    total: PerWorker
    inner: PyTree


def accumulate(tx: optax.GradientTransformation, every: int) -> optax.GradientTransformation:
    """Transformation: another one, once every k steps, on the mean of k gradients.

    Each worker adds up its own gradients and only their mean is exchanged: the link is used once in
    k steps, as for one batch k times as large. In between the updates are zeros. What is lost by
    rounding a mean to the dtype of a narrow leaf is added to the next.

        tx = fg.accumulate(
            optax.chain(fg.compressed_pmean(exchange, memory, axis_name="data"), optax.adamw(3e-4)),
            every=4,
        )

    Do not use `optax.MultiSteps` for this: it exchanges in every step and throws most results away,
    and its sum, which differs between the workers, is typed as replicated.

    Args:
      tx: what to do with the mean, with `compressed_pmean` in it.
      every: k, the number of gradients to an update.

    Returns:
      An `optax.GradientTransformation` whose state is an `AccumulateState`; `fg.state_specs` knows
      what of it each worker has of its own.

    Raises:
      ValueError: if `every` is not positive; while tracing, if `update` gets a `weight`, because
        that of the last gradient is not that of all.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = fg.accumulate(optax.sgd(1.0), every=2)
      >>> first, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
      >>> second, state = tx.update(3 * jnp.ones(1), state)
      >>> first.tolist(), second.tolist()
      ([0.0], [-2.0])
    """
    check_transformation("accumulate(tx)", tx)
    check_count("accumulate(every)", every, "use 1 for each.")

    def init(params: optax.Params) -> AccumulateState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return AccumulateState(jnp.zeros((), jnp.int32), add_worker_axis(zeros), tx.init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, AccumulateState]:
        refuse_weight("accumulate", extra.get("weight"), "each of the gradients has its own")
        total = jax.tree.map(
            lambda t, g: t + g.astype(jnp.float32) * (1.0 / every),
            drop_worker_axis(state.total),
            updates,
        )
        run = optax.with_extra_args_support(tx).update

        def emit(inner: PyTree) -> Any:
            mean, lost = _rounding.narrowed(total, updates)
            done, inner = run(mean, inner, params, **extra)
            if lost is None:
                return done, jax.tree.map(jnp.zeros_like, total), inner
            # Nothing of a mean that was not finite, or all that follow would not be.
            return done, jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), lost), inner

        def wait(inner: PyTree) -> Any:
            like, *_ = jax.eval_shape(emit, inner)
            # Typed alike: a mean over the workers may still vary along another axis.
            zeros = jax.tree.map(lambda a: _axes.vary_like(jnp.zeros(a.shape, a.dtype), a), like)
            return zeros, total, inner

        step = _count.next_step(state.step, every)
        due = step % every == 0
        out, total, inner = lax.cond(due, emit, wait, state.inner)
        return out, AccumulateState(step, add_worker_axis(total), inner)

    return optax.GradientTransformationExtraArgs(init, update)
