"""What reaches the inner optimizer of an optimizer: the loss, and whatever else is passed."""

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
}


def moves(tx, mode, **extra):
    """Of one step on gradients of ones, a row a worker."""

    def step(params, extra):
        grads = jax.tree.map(jnp.ones_like, params)
        return tx.update(grads, tx.init(params), params, **extra)[0]["w"]

    return np.asarray(everywhere(mode, step, WORKERS)(ROWS, extra))


LOSS = np.float32([1, 2, 4, 9])


@pytest.mark.parametrize("name", LOCAL)
def test_an_inner_optimizer_of_a_worker_sees_its_own_loss(name):
    found = moves(LOCAL[name](by_loss()), "vmap", value=LOSS)
    np.testing.assert_allclose(found[:, 0, 0], -LOSS, rtol=1e-3)


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
def test_the_owners_of_shards_see_the_loss_of_all(mode):
    """As weighed as the gradients are."""
    codecs = {"gradients": fg.Identity(), "parameters": fg.Identity()}
    tx = fg.optimizers.sharded(by_loss(), WORKERS, **codecs)

    def step(value, weight):
        grads = jax.tree.map(jnp.ones_like, PARAMS)
        grads = jax.tree.map(lambda g: g * (1 + 0 * value), grads)
        return tx.update(grads, tx.init(PARAMS), PARAMS, value=value, weight=weight)[0]["w"]

    weights = np.float32([1, 0, 2, 1])
    found = np.asarray(everywhere(mode, step, WORKERS)(LOSS, weights))
    np.testing.assert_allclose(found, np.full((WORKERS, 6, 4), -(1 + 8 + 9) / 4), rtol=1e-5)


def test_the_outer_optimizer_of_a_meeting_sees_the_loss_of_all():
    exact = fg.AllReduce(), fg.NoMemory()
    tx = fg.optimizers.diloco(optax.sgd(1.0), by_loss(), 1, *exact)
    np.testing.assert_allclose(moves(tx, "shard_map", value=LOSS), -4.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["sharded", *LOCAL])
def test_a_plateau_of_the_loss_is_seen(name):
    """Of two steps at the same loss the second is half as long."""
    inner = optax.chain(
        optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, cooldown=0)
    )
    make = {**LOCAL, "sharded": lambda inner: fg.optimizers.sharded(inner, WORKERS)}
    tx = make[name](inner)

    def step(params, value):
        state = tx.init(params)
        grads = jax.tree.map(jnp.ones_like, params)

        def one(state, _):
            updates, state = tx.update(grads, state, params, value=value)
            return state, jnp.mean(updates["w"])

        return jax.lax.scan(one, state, length=4)[1]

    found = np.asarray(everywhere("vmap", step, WORKERS)(ROWS, np.ones(WORKERS, np.float32)))
    assert np.abs(found[:, -1]).max() < 0.7 * np.abs(found[:, 0]).min()


def test_an_array_that_is_for_the_rest_of_a_chain_changes_nothing():
    tx = fg.optimizers.sharded(optax.sgd(0.1), WORKERS)
    np.testing.assert_array_equal(moves(tx, "vmap", batch=ROWS), moves(tx, "vmap"))
