"""Which optimizers may be sharded: what does to a shard what it does to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from cases import gradients, values
from parallel import AXIS, everywhere

import fftgrad as fg

WORKERS = 4
SHAPES = {"w": (10, 12), "bias": (12,), "deep": (3, 2, 8), "scale": ()}
PARAMS = {name: jnp.asarray(values(shape, seed=7)) for name, shape in SHAPES.items()}


def masked_decay(mask):
    decay = optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(mask, p))
    return optax.chain(optax.scale_by_adam(), decay, optax.scale(-0.01))


def masked(inner, mask):
    return optax.chain(optax.masked(inner, lambda p: jax.tree.map(mask, p)), optax.sgd(0.1))


def sharded(inner):
    return fg.optimizers.sharded(
        inner, WORKERS, gradients=fg.Identity(), parameters=fg.Identity(), axis_name=AXIS
    )


EACH_VALUE = r"sharded\(inner\): must update each value by itself.*use optax.adamw"
FROM_VALUES = r"sharded\(inner\): must start from the shapes.*use optax.adamw"
BY_SHAPE = r"sharded\(inner\): must treat a shard as it treats the leaf.*by names or by ndim"
REFUSED = {
    "schedule-free": (optax.contrib.schedule_free_sgd(0.1), FROM_VALUES),
    "dog": (optax.contrib.dog(), FROM_VALUES),
    "centered": (optax.chain(optax.centralize(), optax.sgd(0.1)), EACH_VALUE),
    "clipped by leaf": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), EACH_VALUE),
    "trust ratio": (optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1)), EACH_VALUE),
    "sm3": (optax.sm3(0.1), BY_SHAPE),
    "noise": (optax.chain(optax.add_noise(0.1, 0.55, 0), optax.sgd(0.1)), EACH_VALUE),
    "decay by size": (masked_decay(lambda a: a.size > 10), BY_SHAPE),
    "decay by length": (masked_decay(lambda a: a.shape[-1:] > (1,)), BY_SHAPE),
    "moments by size": (masked(optax.scale_by_adam(), lambda a: a.size > 10), BY_SHAPE),
    "moments of the longest": (masked(optax.scale_by_adam(), lambda a: a.size > 100), BY_SHAPE),
    "frozen by size": (masked(optax.set_to_zero(), lambda a: a.size <= 10), BY_SHAPE),
    "factors": (
        optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.scale(-0.1)),
        BY_SHAPE,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    inner, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        sharded(inner).init(PARAMS)


@pytest.mark.parametrize("values", [(3, 3), (2, 2, 2)], ids=["matrices", "cubes"])
def test_what_looks_at_rows_alone_is_refused(values):
    """Also along the last axis, where there are more than two."""

    def less_mean(grads, state, params=None):
        del params
        return jax.tree.map(lambda g: g - g.mean(axis=-1, keepdims=True), grads), state

    inner = optax.chain(
        optax.GradientTransformation(lambda _: optax.EmptyState(), less_mean), optax.sgd(0.1)
    )
    with pytest.raises(ValueError, match=EACH_VALUE):
        sharded(inner).init(jnp.zeros(values))


def test_what_keeps_values_is_refused_of_scalars_too():
    with pytest.raises(ValueError, match=FROM_VALUES):
        sharded(optax.contrib.schedule_free_sgd(0.1)).init({"scale": jnp.float32(5.0)})


ALLOWED = {
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "decay of matrices": masked_decay(lambda a: a.ndim > 1),
    "decay of all but scalars": masked_decay(lambda a: a.ndim > 0),
    "moments of matrices": masked(optax.scale_by_adam(), lambda a: a.ndim > 1),
    "rms": optax.rmsprop(0.01, centered=True, momentum=0.9),
    "adadelta": optax.adadelta(0.1),
    "amsgrad": optax.amsgrad(0.01),
    "clipped by value": optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=0.01, weight_decay=0.1),
    "parts": optax.partition(
        {"a": optax.adam(0.01), "s": optax.sgd(0.1)},
        {"w": "a", "bias": "s", "deep": "a", "scale": "s"},
    ),
    "finite": optax.apply_if_finite(optax.adam(0.01), 9),
    "unfactored": optax.chain(optax.scale_by_factored_rms(factored=False), optax.scale(-0.1)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_it_is_as_without_shards(name):
    """Two steps, so that the state counts."""
    inner, tx = ALLOWED[name], sharded(ALLOWED[name])
    likes = jax.tree.map(jax.typeof, PARAMS)

    def steps(one, two):
        state, params = tx.init(PARAMS), PARAMS
        for grads in (one, two):
            moves, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, moves)
        return params

    grads = [gradients(likes, WORKERS, seed=seed) for seed in (0, 1)]
    found = everywhere("vmap", steps, WORKERS)(*grads)
    params, state = PARAMS, inner.init(PARAMS)
    for rows in grads:
        mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), rows)
        moves, state = inner.update(mean, state, params)
        params = optax.apply_updates(params, moves)
    for key, leaf in params.items():
        for row in found[key]:
            np.testing.assert_allclose(row, leaf, rtol=1e-4, atol=1e-5)
