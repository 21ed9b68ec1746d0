"""Data-parallel training with compressed gradients: Equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _job import batches, first_params, report, use_cpu_devices

import fftgrad as fg

use_cpu_devices()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
tx = fg.optimizers.feedback_adam(4e-3, fg.methods.top_k(0.01), axis_name="data")


class Dense(eqx.Module):
    """A layer with weights as the other examples have them; eqx.nn.Linear's are transposed."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight + self.bias[None]


class Model(eqx.Module):
    """Two dense layers."""

    one: Dense
    two: Dense

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.two(jnp.tanh(self.one(x)))


first = jax.tree.map(jnp.asarray, first_params())
model = Model(Dense(first["w1"], first["b1"]), Dense(first["w2"], first["b2"]))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Nats a byte, of a worker's rows."""
    logits = eqx.combine(params, static)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    """A worker's step."""
    value, grads = fg.value_and_grad(loss, "data")(params, x, y)
    updates, state = tx.update(grads, state, params)
    return eqx.apply_updates(params, updates), state, jax.lax.pmean(value, "data")


state = fg.init_state(tx, params, mesh, "data")
train = fg.data_parallel(step, mesh, "data", donate_argnums=1)
losses: list[jax.Array] = []
for x, y in batches():
    params, state, value = train(params, state, x, y)
    losses.append(value)

one, two = params.one, params.two
last = {"w1": one.weight, "b1": one.bias, "w2": two.weight, "b2": two.bias}
report(losses[0], losses[-1], last)
