"""Data-parallel training with compressed gradients: parameters in a dict, and optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from _job import batches, first_params, report, use_cpu_devices

import fftgrad as fg

use_cpu_devices()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
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


params: Any = first_params()
state = fg.init_state(tx, params, mesh, "data")
train = fg.data_parallel(step, mesh, "data", donate_argnums=1)
losses: list[jax.Array] = []
for x, y in batches():
    params, state, value = train(params, state, x, y)
    losses.append(value)
report(losses[0], losses[-1], params)
