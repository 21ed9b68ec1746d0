"""The low-rank methods train a real classifier about as well as a dense mean does."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.datasets
from parallel import AXIS, mesh_of

import fftgrad as fg

WORKERS, STEPS, BATCH = 4, 120, 32
MOMENTUM = optax.sgd(0.1, momentum=0.9)
TRAINED = {
    "dense": optax.chain(fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS), MOMENTUM),
    "acp_sgd": fg.optimizers.feedback_sgd(0.1, 0.9, fg.methods.acp_sgd(rank=4), axis_name=AXIS),
    "scale_by_dion": optax.chain(
        fg.methods.scale_by_dion(rank=8, dense=("last",)), optax.scale_by_learning_rate(0.02)
    ),
}


@functools.cache
def digits():
    data = sklearn.datasets.load_digits()
    return data.data.astype(np.float32) / 16, data.target.astype(np.int32)


def loss(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
    logits = hidden @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@functools.cache
def trained(name):
    """The loss over all digits after training on four fifths of them, and over the rest."""
    images, labels = digits()
    tx, mesh = TRAINED[name], mesh_of(WORKERS)
    rng = np.random.default_rng(0)
    params = {
        "first": jnp.asarray(rng.normal(0, 64**-0.5, (64, 48)), jnp.float32),
        "last": jnp.asarray(rng.normal(0, 48**-0.5, (48, 10)), jnp.float32),
        "bias": jnp.zeros(48),
    }

    def step(params, state, x, y):
        _, grads = fg.value_and_grad(loss, AXIS)(params, (x, y))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    train = fg.data_parallel(step, mesh, AXIS)
    state = fg.init_state(tx, params, mesh, AXIS)
    for _ in range(STEPS):
        chosen = rng.integers(0, 1437, WORKERS * BATCH)
        params, state = train(params, state, images[chosen], labels[chosen])
    return tuple(
        float(loss(params, (images[part], labels[part])))
        for part in (slice(0, 1437), slice(1437, None))
    )


@pytest.mark.parametrize("name", ["acp_sgd", "scale_by_dion"])
def test_it_trains_about_as_well_as_dense(name):
    images, labels = digits()
    assert len(images) == len(labels) == 1797
    for found, dense in zip(trained(name), trained("dense"), strict=True):
        assert found <= 1.15 * dense + 0.02
    assert trained(name)[0] < 0.2
