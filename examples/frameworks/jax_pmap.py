"""Data-parallel training with compressed gradients: jax.pmap, saved and restored on the way.

`flax.jax_utils.unreplicate` is right for parameters, of which all workers have the same. It is
wrong for the state: each worker has a residual of its own, and it keeps one of eight. Save the
state with its axis of workers, and hand it back as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from _job import STEPS, WORKERS, batches, first_params, report, use_cpu_devices
from flax import jax_utils

import fftgrad as fg

use_cpu_devices()
tx = fg.optimizers.feedback_adam(4e-3, fg.methods.top_k(0.01), axis_name="data")


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Nats a byte, of a worker's rows."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    logits = hidden @ params["w2"] + params["b2"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    """A worker's step."""
    value, grads = fg.value_and_grad(loss, "data")(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")


train = jax.pmap(step, axis_name="data")
params = jax_utils.replicate(first_params())
state = jax.pmap(tx.init)(params)
losses: list[jax.Array] = []
for number, (x, y) in enumerate(batches()):
    if number == STEPS // 2:  # as a program does that is stopped and started again
        saved = jax.device_get((jax_utils.unreplicate(params), state))  # the state, of all workers
        params, state = jax_utils.replicate(saved[0]), saved[1]
    rows = [a.reshape(WORKERS, -1, *a.shape[1:]) for a in (x, y)]
    params, state, value = train(params, state, *rows)
    losses.append(value[0])
report(losses[0], losses[-1], jax_utils.unreplicate(params))
