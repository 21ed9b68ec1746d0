"""Gradients a step late, so that the exchange need not wait for them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import PyTree
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.training._weigh import refuse_weight


def delay() -> optax.GradientTransformationExtraArgs:
    """Transformation: the gradients of the step before; zeros in the first step.

    In front of `compressed_pmean`, it makes the exchange depend on the state alone. So a compiler
    with asynchronous collectives can run it beside the forward and backward pass. Error feedback
    loses nothing. For equal gradients, the updates are those without it, one step later, but an
    exchange that draws, or begins with a state, does so a step earlier.

        mean = fg.compressed_pmean(exchange, memory, axis_name="data")
        tx = optax.chain(fg.training.delay(), mean, ...)

    The price: gradients are a step old, and a float32 gradient more is kept. XLA for a CPU has no
    asynchronous collectives, so there it gains nothing.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `PerWorker`.

    Raises:
      ValueError: while tracing, if `update` gets a `weight`, which is not that of the step before.

    Example:
      >>> tx = fg.training.delay()
      >>> first, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
      >>> second, state = tx.update(jnp.zeros(2), state)
      >>> first.tolist(), second.tolist()
      ([0.0, 0.0], [1.0, 1.0])

    References:
      Stich and Karimireddy, JMLR 21, 2020, arXiv:1909.05350.
    """

    def init(params: optax.Params) -> PerWorker:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return add_worker_axis(zeros)

    def update(
        updates: optax.Updates, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[optax.Updates, PerWorker]:
        del params
        refuse_weight("delay", extra.get("weight"), "what it would weigh is of the step before")
        late = jax.tree.map(lambda old, g: old.astype(g.dtype), drop_worker_axis(state), updates)
        return late, add_worker_axis(jax.tree.map(lambda g: g.astype(jnp.float32), updates))

    return optax.GradientTransformationExtraArgs(init, update)
