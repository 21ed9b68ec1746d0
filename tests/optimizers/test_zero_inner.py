"""Which optimizers may be sharded: what does to a shard what it does to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from cases import gradients, values
from parallel import AXIS, everywhere, mesh_of

import fftgrad as fg

WORKERS = 4
SHAPES = {"w": (10, 12), "bias": (12,), "deep": (3, 2, 8), "scale": (), "last": (12,)}
PARAMS = {name: values(shape, seed=7) for name, shape in SHAPES.items()}


def masked_decay(mask):
    decay = optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(mask, p))
    return optax.chain(optax.scale_by_adam(), decay, optax.scale(-0.01))


def masked(inner, mask):
    return optax.chain(optax.masked(inner, lambda p: jax.tree.map(mask, p)), optax.sgd(0.1))


def sharded(inner):
    return fg.optimizers.sharded(
        inner,
        WORKERS,
        gradients=fg.codecs.Identity(),
        parameters=fg.codecs.Identity(),
        axis_name=AXIS,
    )


def step_by_hand(moves):
    """SGD whose updates go through a function first."""
    return optax.chain(optax.stateless(lambda grads, _: moves(grads)), optax.sgd(0.1))


def every(function):
    return step_by_hand(lambda grads: jax.tree.map(function, grads))


def running_sum(g):
    return jnp.cumsum(g).reshape(g.shape)


REFUSED = {
    "by the global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "schedule-free": optax.contrib.schedule_free_sgd(0.1),
    "by place": step_by_hand(lambda g: g | {"bias": g["bias"] * jnp.arange(g["bias"].size)}),
    "in proportion to the size": every(lambda g: g / max(1, g.size)),
    "running sums": every(running_sum),
    "noise": optax.chain(optax.add_noise(0.1, 0.55, 0), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    message = r"sharded\(inner\): must update each value by itself.*use optax.adamw"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(sharded(REFUSED[name]).init, PARAMS)


ALLOWED = {
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "decay of matrices": masked_decay(lambda a: a.ndim > 1),
    "moments of matrices": masked(optax.scale_by_adam(), lambda a: a.ndim > 1),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=0.01, weight_decay=0.1),
    "parts": optax.partition(
        {"a": optax.adam(0.01), "s": optax.sgd(0.1)},
        {"w": "a", "bias": "s", "deep": "a", "scale": "s", "last": "a"},
    ),
    "skips what is not finite": optax.MultiSteps(
        optax.sgd(0.1), 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "a schedule by table": optax.sgd(lambda count: jnp.asarray([0.1, 0.2, 0.3])[count % 3]),
    "a loop of three": every(lambda g: jax.lax.fori_loop(0, 3, lambda _, a: a / 2 + g, g)),
    "unfactored": optax.chain(optax.scale_by_factored_rms(factored=False), optax.scale(-0.1)),
}


def test_a_state_that_starts_from_a_constant_is_made_on_a_mesh():
    """There JAX types the constant for a leaf without axes, and not that for its shard."""
    tx = sharded(optax.chain(optax.scale_by_rms(), optax.scale(-0.1)))
    params = {"w": np.ones((3, 2), np.float32), "scale": np.float32(1.0)}
    assert int(fg.init_state(tx, params, mesh_of(WORKERS), AXIS).step) == 0


@pytest.mark.parametrize("name", ALLOWED)
def test_it_is_as_without_shards(name):
    """Two steps, so that the state counts."""

    def steps(rows):
        ends = []
        for tx in (sharded(ALLOWED[name]), ALLOWED[name]):
            state, params = tx.init(PARAMS), PARAMS
            for grads in rows:
                grads = jax.lax.pmean(grads, AXIS) if tx is ALLOWED[name] else grads
                moves, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, moves)
            ends.append(params)
        return ends

    grads = [gradients(PARAMS, WORKERS, seed=seed) for seed in (0, 1)]
    found, wanted = everywhere("vmap", steps, WORKERS)(grads)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# Every optimizer that optax has, against what its steps do


def chained(step):
    return optax.chain(step, optax.sgd(0.1))


NAMED = """
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion
nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd
sign_sgd signum sm3 yogi
"""
IN_CONTRIB = """
acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy
schedule_free_adamw schedule_free_sgd simplified_ademamix
"""
WITHOUT_NUMBER = "centralize normalize_by_update_norm scale_by_param_block_rms"
WITHOUT_RATE = {"cocob", "dadapt_adamw", "dog", "dowg", "momo", "momo_adam", "prodigy"}
EVERY = {
    **{name: lambda name=name: getattr(optax, name)(0.01) for name in NAMED.split()},
    **{
        name: lambda name=name: getattr(optax.contrib, name)(
            *([] if name in WITHOUT_RATE else [0.01])
        )
        for name in IN_CONTRIB.split()
    },
    **{name: lambda name=name: chained(getattr(optax, name)()) for name in WITHOUT_NUMBER.split()},
    "late mask": lambda: chained(
        optax.transforms.conditionally_mask(optax.scale_by_adam(), lambda s, **_: s >= 5)
    ),
    "now and then": lambda: chained(optax.apply_every(3)),
    "clip": lambda: chained(optax.clip(0.5)),
    "clip by unit": lambda: chained(optax.adaptive_grad_clip(0.5)),
    "nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
    "several steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "raveled": lambda: every(lambda g: jnp.tanh(g.ravel()).reshape(g.shape)),
}
DIVIDED = {"w": (8, 3), "bias": (12,), "cube": (2, 2, 4)}


def cut(tree):
    """The shards of four workers, one after the other."""
    return [
        {k: np.split(a.ravel(), 4)[i].reshape(-1, *[1] * (a.ndim - 1)) for k, a in tree.items()}
        for i in range(4)
    ]


def moves_of(inner, params, start, grads):
    """What an optimizer, its state made of `start`, does with the gradients of some steps."""

    def step(carry, given):
        params, state = carry
        grad, value = given
        moves, state = inner.update(grad, state, params, value=value)
        return (optax.apply_updates(params, moves), state), moves

    inner = optax.with_extra_args_support(inner)
    losses = jnp.linspace(2.0, 1.0, 14)
    run = jax.jit(lambda p, s, g: jax.lax.scan(step, (p, inner.init(s)), (g, losses))[1])
    return run(params, start, grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_what_is_refused_is_what_shards_do_otherwise(name):
    """Over 14 steps, in which gradients grow and shrink."""
    inner = EVERY[name]()
    params = {k: values(shape, seed=i) for i, (k, shape) in enumerate(DIVIDED.items())}
    size = np.asarray([1, 3, 30, 0.1, 0.01, 1, 50, 2, 1, 1e-3, 5, 1, 0.5, 10], "f4")
    grads = [
        {k: factor * values(shape, seed=20 + t) for k, shape in DIVIDED.items()}
        for t, factor in enumerate(size)
    ]
    stacked = jax.tree.map(lambda *each: np.stack(each), *grads)
    whole = moves_of(inner, params, params, stacked)
    rows = [jax.tree.map(lambda *each: np.stack(each), *of_one)
            for of_one in zip(*map(cut, grads), strict=True)]  # fmt: skip
    # No worker knows its shard yet where the state is made.
    parts = [
        moves_of(inner, own, jax.tree.map(jnp.zeros_like, own), row)
        for own, row in zip(cut(params), rows, strict=True)
    ]
    apart = 0.0
    for key, leaf in whole.items():
        leaf = np.asarray(leaf).reshape(14, -1)
        joined = np.concatenate([np.asarray(p[key]).reshape(14, -1) for p in parts], axis=1)
        largest = np.abs(leaf).max(1, keepdims=True) + 1e-12
        apart = max(apart, float((np.abs(leaf - joined) / largest).max()))
    try:
        sharded(inner).init(params)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == (apart < 1e-3)
