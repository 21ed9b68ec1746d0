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


def step_by_hand(moves):
    """SGD whose updates go through a function first."""
    return optax.chain(optax.stateless(lambda grads, _: moves(grads)), optax.sgd(0.1))


def every(function):
    return step_by_hand(lambda grads: jax.tree.map(function, grads))


def running_sum(g):
    return jnp.cumsum(g).reshape(g.shape)


def by_the_sum_of_the_step_before():
    """SGD whose step is what the gradients summed to in the last one."""

    def update(grads, state, params=None):
        del params
        total = sum(jnp.sum(g) for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda g: -state * g, grads), total

    return optax.GradientTransformation(lambda _: jnp.float32(0.1), update)


def halved_while_large(g):
    return jax.lax.while_loop(lambda a: jnp.max(a) > 1, lambda a: a / 2, g)


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
    "whole tree": (optax.contrib.dadapt_adamw(), EACH_VALUE),
    "clipped from the sixth step on": (
        optax.chain(
            optax.transforms.conditionally_transform(
                optax.clip_by_global_norm(1.0), lambda step, **_: step >= 5
            ),
            optax.sgd(0.1),
        ),
        EACH_VALUE,
    ),
    "step of Polyak": (optax.polyak_sgd(), EACH_VALUE),
    "skips what is large": (
        optax.MultiSteps(
            optax.sgd(0.1),
            2,
            should_skip_update_fn=lambda *a: optax.skip_large_updates(*a, max_squared_norm=1.0),
        ).gradient_transformation(),
        EACH_VALUE,
    ),
    "of another leaf": (
        step_by_hand(lambda g: g | {"w": g["w"] + g["scale"]}),
        r"update of params\['w'\] rests on several leaves.*use optax.adamw",
    ),
    "leaves exchanged": (
        step_by_hand(lambda g: g | {"bias": g["last"], "last": g["bias"]}),
        r"update of params\['bias'\] rests on another leaf.*use optax.adamw",
    ),
    "by place": (
        step_by_hand(lambda g: g | {"bias": g["bias"] * jnp.arange(g["bias"].size)}),
        r"params\['bias'\] rests on what differs by place.*use optax.adamw",
    ),
    "by place alone": (
        step_by_hand(lambda g: g | {"bias": jnp.arange(1.0, 1 + g["bias"].size)}),
        r"params\['bias'\] rests on what differs by place.*use optax.adamw",
    ),
    "in another order": (
        every(lambda g: jax.lax.reshape(g, g.shape, tuple(reversed(range(g.ndim))))),
        r"rests on reshape.*use optax.adamw",
    ),
    "unless all are zero": (every(lambda g: jnp.where(jnp.any(g != 0), g, 1.0)), EACH_VALUE),
    "in proportion to the size": (every(lambda g: g / max(1, g.size)), BY_SHAPE),
    "in the next step": (by_the_sum_of_the_step_before(), EACH_VALUE),
    "running sums": (every(running_sum), r"rests on cumsum.*use optax.adamw"),
    "a loop until all are small": (every(halved_while_large), EACH_VALUE),
    "asks for more": (optax.lbfgs(), r"value= alone.*value_fn.*use optax.adamw"),
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
        {"w": "a", "bias": "s", "deep": "a", "scale": "s", "last": "a"},
    ),
    "finite": optax.apply_if_finite(optax.adam(0.01), 9),
    "zeros for NaN": optax.chain(optax.zero_nans(), optax.adam(0.01)),
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
    params = {"w": jnp.ones((3, 2)), "scale": jnp.float32(1.0)}
    assert int(fg.init_state(tx, params, mesh_of(WORKERS), AXIS).step) == 0


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


# Every optimizer that optax has, against what its steps do


def chained(step):
    return lambda: optax.chain(step(), optax.sgd(0.1))


NAMED = """
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion
nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd
sign_sgd signum sm3 yogi
"""
IN_CONTRIB = """
acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy
schedule_free_adamw schedule_free_sgd simplified_ademamix
"""
WITHOUT_RATE = {"cocob", "dadapt_adamw", "dog", "dowg", "momo", "momo_adam", "prodigy"}
EVERY = {
    **{name: lambda name=name: getattr(optax, name)(0.01) for name in NAMED.split()},
    **{
        name: lambda name=name: getattr(optax.contrib, name)(
            *([] if name in WITHOUT_RATE else [0.01])
        )
        for name in IN_CONTRIB.split()
    },
    "late clip": lambda: REFUSED["clipped from the sixth step on"][0],
    "late scale": chained(
        lambda: optax.transforms.conditionally_transform(optax.scale(0.5), lambda s, **_: s >= 5)
    ),
    "late mask": chained(
        lambda: optax.transforms.conditionally_mask(optax.scale_by_adam(), lambda s, **_: s >= 5)
    ),
    "ema": chained(lambda: optax.ema(0.9)),
    "now and then": chained(lambda: optax.apply_every(3)),
    "clip": chained(lambda: optax.clip(0.5)),
    "clip by global norm": chained(lambda: optax.clip_by_global_norm(0.5)),
    "clip by unit": chained(lambda: optax.adaptive_grad_clip(0.5)),
    "clip by block": chained(lambda: optax.clip_by_block_rms(0.5)),
    "centralize": chained(optax.centralize),
    "normalize": chained(optax.normalize_by_update_norm),
    "param rms": chained(optax.scale_by_param_block_rms),
    "stddev": chained(optax.scale_by_stddev),
    "rss": chained(optax.scale_by_rss),
    "nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
    "several steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "warm-up": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, 12)),
    "pieces": lambda: optax.sgd(optax.piecewise_interpolate_schedule("linear", 0.1, {5: 0.5})),
    "running": lambda: every(running_sum),
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
    print(name, accepted, apart)
    assert accepted == (apart < 1e-3)
