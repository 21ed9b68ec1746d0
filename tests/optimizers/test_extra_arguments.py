"""What reaches the inner optimizer of an optimizer: the loss, and whatever else is passed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import values
from parallel import everywhere

import fftgrad as fg

WORKERS = 4
PARAMS = {"w": values((6, 4))}
ROWS = {"w": np.stack([PARAMS["w"]] * WORKERS)}


def by_loss():
    """SGD whose step is the loss that it is told of."""

    def update(updates, state, params=None, *, value, **extra):
        del params, extra
        return jax.tree.map(lambda g: -value * g, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


LOCAL = {
    "diloco": lambda inner: fg.optimizers.diloco(inner, optax.sgd(1.0), sync_every=5),
    "sparse_loco": lambda inner: fg.optimizers.sparse_loco(inner, sync_every=5, k=4, block=4),
    "choco_sgd": lambda inner: fg.contrib.gossip.choco_sgd(
        inner, fg.Sign(), fg.contrib.gossip.ring(4), gamma=1e-6
    ),
    "beer": lambda inner: fg.contrib.gossip.beer(
        inner, fg.Sign(), fg.contrib.gossip.ring(4), gamma=1e-6
    ),
    "local_state": fg.training.local_state,
}


LOSS = np.float32([1, 2, 4, 9])


@pytest.mark.parametrize("name", LOCAL)
def test_an_inner_optimizer_of_a_worker_sees_its_own_loss(name):
    """Of one step on gradients of ones; one that takes no loss is not told of it."""

    def step(params, value, inner):
        tx, grads = LOCAL[name](inner), jax.tree.map(jnp.ones_like, params)
        return tx.update(grads, tx.init(params), params, value=value)[0]["w"]

    run = everywhere("vmap", functools.partial(step, inner=by_loss()), WORKERS)
    np.testing.assert_allclose(run(ROWS, LOSS)[:, 0, 0], -LOSS, rtol=1e-3)
    none = functools.partial(step, inner=optax.clip(1.0))
    jax.eval_shape(everywhere("vmap", none, WORKERS), ROWS, LOSS)


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
def test_the_owners_of_shards_see_the_loss_of_all(mode):
    """As weighed as the gradients are."""
    codecs = {"gradients": fg.codecs.Identity(), "parameters": fg.codecs.Identity()}
    tx = fg.optimizers.sharded(by_loss(), WORKERS, **codecs)

    def step(value, weight):
        grads = jax.tree.map(jnp.ones_like, PARAMS)
        grads = jax.tree.map(lambda g: g * (1 + 0 * value), grads)
        extra = {"value": value, "weight": weight, "batch": weight}  # of the rest of a chain
        return tx.update(grads, tx.init(PARAMS), PARAMS, **extra)[0]["w"]

    weights = np.float32([1, 0, 2, 1])
    found = np.asarray(everywhere(mode, step, WORKERS)(LOSS, weights))
    np.testing.assert_allclose(found, np.full((WORKERS, 6, 4), -(1 + 8 + 9) / 4), rtol=1e-5)
