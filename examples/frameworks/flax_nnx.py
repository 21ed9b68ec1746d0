"""Data-parallel training with compressed gradients: Flax NNX and its Optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from _job import HIDDEN, INPUTS, OUTPUTS, batches, first_params, report, use_cpu_devices
from flax import nnx

import fftgrad as fg

use_cpu_devices()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
tx = fg.optimizers.feedback_adam(4e-3, fg.methods.top_k(0.01), axis_name="data")


class Model(nnx.Module):
    """Two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.two = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.two(nnx.tanh(self.one(x)))


def weights(model: Any) -> dict[str, Any]:
    """The parameters, by the names that they have in the other examples."""
    one, two = model.one, model.two
    return {"w1": one.kernel, "b1": one.bias, "w2": two.kernel, "b2": two.bias}


model = Model(nnx.Rngs(0))
for name, value in first_params().items():
    weights(model)[name][...] = jnp.asarray(value)
graph = nnx.graphdef((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


def create(params: Any) -> Any:
    """The state of one worker: that of the model and of its optimizer."""
    own = nnx.merge(nnx.graphdef(model), params)
    return nnx.state((own, nnx.Optimizer(own, tx, wrt=nnx.Param)))


def loss(params: Any, graph: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Nats a byte, of a worker's rows."""
    logits = nnx.merge(graph, params)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """A worker's step."""
    model, optimizer = nnx.merge(graph, state)
    definition, params = nnx.split(model, nnx.Param)
    value, grads = fg.value_and_grad(loss, "data")(params, definition, x, y)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), jax.lax.pmean(value, "data")


state = fg.init_state(create, nnx.state(model, nnx.Param), mesh, "data")  # of all workers
train = fg.data_parallel(step, mesh, "data", donate_argnums=0)
losses: list[jax.Array] = []
for x, y in batches():
    state, value = train(state, x, y)
    losses.append(value)

nnx.update((model, nnx.Optimizer(model, tx, wrt=nnx.Param)), state)
report(losses[0], losses[-1], {name: weight[...] for name, weight in weights(model).items()})
