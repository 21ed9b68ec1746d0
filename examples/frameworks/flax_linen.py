"""Data-parallel training with compressed gradients: Flax Linen and its TrainState."""

from typing import Any

import flax.linen as nn
import jax
import optax
from _job import HIDDEN, OUTPUTS, batches, first_params, report, use_cpu_devices
from flax.training.train_state import TrainState

import fftgrad as fg

use_cpu_devices()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
tx = fg.optimizers.feedback_adam(4e-3, fg.methods.top_k(0.01), axis_name="data")


class Model(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(nn.Dense(HIDDEN, name="one")(x))
        return nn.Dense(OUTPUTS, name="two")(x)


def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    """A worker's step."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, grads = fg.value_and_grad(loss, "data")(state.params, x, y)
    return state.apply_gradients(grads=grads), jax.lax.pmean(value, "data")


def create(params: Any) -> TrainState:
    """The state of one worker."""
    return TrainState.create(apply_fn=Model().apply, params=params, tx=tx)


first = first_params()  # in place of Model().init(key, x)["params"]
params = {
    "one": {"kernel": first["w1"], "bias": first["b1"]},
    "two": {"kernel": first["w2"], "bias": first["b2"]},
}
state = fg.init_state(create, params, mesh, "data")  # of all workers
train = fg.data_parallel(step, mesh, "data", donate_argnums=0)
losses: list[jax.Array] = []
for x, y in batches():
    state, value = train(state, x, y)
    losses.append(value)

one, two = state.params["one"], state.params["two"]
last = {"w1": one["kernel"], "b1": one["bias"], "w2": two["kernel"], "b2": two["bias"]}
report(losses[0], losses[-1], last)
