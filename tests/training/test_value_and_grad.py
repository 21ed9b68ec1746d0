"""The gradient of one worker's loss, whose mean over the workers is that of the global one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from parallel import AXES, AXIS, MODES, grid, mesh_of

import fftgrad as fg

WORKERS = 8
PARAMS = {
    "net": [
        {"w": np.full((3, 2), 0.3, np.float32), "b": np.zeros((1, 2), np.float32)},
        (np.arange(2, dtype=np.float32),),
    ]
}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((WORKERS, 4, 3)).astype(np.float32)
Y = RNG.standard_normal((WORKERS, 4)).astype(np.float32)
MASK = np.arange(4) < RNG.integers(0, 5, (WORKERS, 1))  # some worker has none


def errors(params, x, y):
    layer, (last,) = params["net"]
    return (jnp.tanh(x @ layer["w"] + layer["b"]) @ last - y) ** 2


def loss(params, x, y):
    return jnp.mean(errors(params, x, y))


def token_loss(params, x, y, mask):
    """Divided by the mean weight over the workers, as where a transformation refuses a weight."""
    return jnp.sum(errors(params, x, y) * mask) / jax.lax.pmean(jnp.sum(mask), AXIS)


def whole_loss(params, x, y, mask):
    return jnp.sum(errors(params, x, y) * mask) / jnp.sum(mask)


def on_workers(mode, function, params, *batch):
    """What each worker returns, one row each; the parameters are replicated."""
    if not mode.startswith("shard_map"):
        run = jax.pmap if mode == "pmap" else lambda *args, **axes: jax.jit(jax.vmap(*args, **axes))
        axes = (None, *(0 for _ in batch))
        return run(function, in_axes=axes, axis_name=AXIS)(params, *batch)

    def row(params, *rows):
        out = function(params, *(r[0] for r in rows))
        return jax.tree.map(lambda a: a[None], out)

    specs = (P(), *(P(AXIS) for _ in batch))
    checked = mode == "shard_map"
    run = jax.shard_map(
        row, mesh=mesh_of(WORKERS), in_specs=specs, out_specs=P(AXIS), check_vma=checked
    )
    return jax.jit(run)(params, *batch)


def exact(function, *args, **options):
    """The value and the gradient, by JAX alone."""
    return jax.device_get(jax.jit(jax.value_and_grad(function, **options))(*args))


def assert_mean_is(rows, expected):
    assert jax.tree.structure(rows) == jax.tree.structure(expected)
    for row, leaf in zip(jax.tree.leaves(rows), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.mean(np.asarray(row), 0), leaf, rtol=2e-5, atol=1e-6)


def flat(a):
    return a.reshape(-1, *a.shape[2:])


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_is_the_gradient_of_the_global_loss(mode):
    grad = fg.value_and_grad(lambda p, x, y: (loss(p, x, y), x), AXIS, has_aux=True)
    (values, aux), grads = on_workers(mode, grad, PARAMS, X, Y)
    assert_mean_is((values, grads), exact(loss, PARAMS, flat(X), flat(Y)))
    np.testing.assert_array_equal(aux, X)
    value, _ = exact(loss, PARAMS, X[3], Y[3])
    np.testing.assert_allclose(np.asarray(values)[3], value, rtol=1e-5)  # the worker's own


@pytest.mark.parametrize(
    ("mode", "dtype"), [*zip(MODES, ["bool", "int32", "float32", "bfloat16"], strict=True)]
)
def test_with_weights_it_is_the_global_sum_over_the_global_weight(mode, dtype):
    mask = MASK.astype(dtype)
    found = on_workers(mode, fg.value_and_grad(token_loss, AXIS), PARAMS, X, Y, mask)
    assert_mean_is(found, exact(whole_loss, PARAMS, *map(flat, (X, Y, mask))))


@pytest.mark.parametrize(
    ("mode", "argnums"), [*zip(MODES, [1, (0, 1), (1, -3), (1, -3)], strict=True)]
)
def test_argnums(mode, argnums):
    def product(a, b, x, y):
        return jnp.mean((x @ (a * b) - y) ** 2)

    a, b = np.arange(3, dtype=np.float32), np.full(3, 1 / 3, np.float32)

    def step(params, x, y):
        return fg.value_and_grad(product, AXIS, argnums=argnums)(*params, x, y=y)

    whole = functools.partial(product, y=flat(Y))
    expected = exact(whole, a, b, flat(X), argnums=argnums)
    assert_mean_is(on_workers(mode, step, (a, b), X, Y), expected)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_over_the_axis_are_differentiated(mode):
    """As batch normalization has them: every worker's loss depends on all batches."""

    def normalized(x, mean):
        hidden = x @ PARAMS["net"][0]["w"]
        return lambda w: jnp.mean(jnp.tanh(hidden * w - mean(hidden * w)) ** 3)

    def own(w, x):
        return normalized(x, lambda h: jax.lax.pmean(jnp.mean(h, 0, keepdims=True), AXIS))(w)

    def whole(w):
        return normalized(flat(X), lambda h: jnp.mean(h, 0, keepdims=True))(w)

    w = np.full((1, 2), 0.7, np.float32)
    rows = on_workers(mode, fg.value_and_grad(own, AXIS), w, X)
    assert_mean_is(rows, exact(whole, w))


def test_two_axes_act_as_one():
    def step(params, *batch):
        return jax.lax.pmean(fg.value_and_grad(loss, AXES)(params, *batch), AXES)

    specs = (P(), P(AXES), P(AXES))
    run = jax.shard_map(step, mesh=grid(2, 4), in_specs=specs, out_specs=P())
    value, _ = jax.jit(run)(PARAMS, flat(X), flat(Y))
    np.testing.assert_allclose(value, exact(loss, PARAMS, flat(X), flat(Y))[0], rtol=1e-5)


def mean_loss(params, x, y):
    return jax.lax.pmean(loss(params, x, y), AXIS)


def sum_loss(params, x, y):
    return jax.lax.psum(jnp.sum(errors(params, x, y)), AXIS) / Y.size


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_all_workers_is_refused_where_jax_tracks_it(mode):
    """Where JAX tracks nothing, a psum's transpose is a psum, so that the 1/w is taken back."""
    for already in (mean_loss, sum_loss):
        grad = fg.value_and_grad(already, AXIS)
        if mode == "shard_map":
            with pytest.raises(ValueError, match=r"1/8 of.*jax\.lax\.pmean\(value, 'data'\)"):
                on_workers(mode, grad, PARAMS, X, Y)
        else:
            expected = exact(loss, PARAMS, flat(X), flat(Y))
            assert_mean_is(on_workers(mode, grad, PARAMS, X, Y), expected)


def test_outside_the_axis_it_says_where_it_belongs():
    with pytest.raises(ValueError, match=r"value_and_grad\(axis_name='data'\).*jax\.shard_map"):
        fg.value_and_grad(loss, AXIS)(PARAMS, X[0], Y[0])


LADDER = fg.exchanges.Ladder((fg.AllGather(fg.TopK(fraction=0.5)), fg.AllReduce()))


@pytest.mark.parametrize("mode", MODES)
def test_the_watched_loss_is_the_mean_over_the_workers(mode):
    tx = fg.methods.recover_by_loss(fg.compressed_pmean(LADDER, axis_name=AXIS), axis_name=AXIS)

    def watched(of_all, params, x, y):
        value, grads = fg.value_and_grad(loss, AXIS)(params, x, y)
        value = jax.lax.pmean(value, AXIS) if of_all else value
        return tx.update(grads, tx.init(params), params, value=value)[1].loss

    wanted, _ = exact(loss, PARAMS, flat(X), flat(Y))
    for of_all in (False, True):
        found = on_workers(mode, functools.partial(watched, of_all), PARAMS, X, Y)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
