"""Data-parallel regression with compressed gradients: the whole of fftgrad in one screenful."""

import os

import jax
import jax.numpy as jnp
import optax

import fftgrad as fg

os.environ.setdefault("PJRT_NPROC", "32")  # eight simulated workers need more threads than cores
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((jax.device_count(),), ("data",))

codec = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.05), fg.LogQuantizer(bits=8))
exchange = fg.AllGather(codec)
tx = optax.chain(
    fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name="data"),
    optax.sgd(0.3),
)


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def step(params, state, x, y):  # of one worker, on its rows of x and y
    _, grads = fg.value_and_grad(loss, "data")(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


keys = jax.random.split(jax.random.key(0), 3)
w1, w2, w_true = (0.1 * jax.random.normal(key, (100, 100)) for key in keys)
x = jax.random.normal(jax.random.key(1), (4096, 100))
y = jnp.tanh(x @ w_true)
params = {"w1": w1, "w2": w2}

state = fg.init_state(tx, params, mesh, "data")
train = fg.data_parallel(step, mesh, "data")  # of all workers

print(f"loss {loss(params, x, y):.4f}")
for i in range(200):
    batch = slice(i % 16 * 256, (i % 16 + 1) * 256)
    params, state = train(params, state, x[batch], y[batch])
print(f"loss {loss(params, x, y):.4f} after 200 steps")
dense, sent = sum(p.nbytes for p in jax.tree.leaves(params)), fg.wire_bytes(exchange, params)
print(f"{sent:,} bytes a worker and step instead of {dense:,}: ratio {dense / sent:.1f}")
