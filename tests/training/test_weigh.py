"""Workers that count by their weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import METHODS, SLOW, gradients
from parallel import AXIS, MODES, everywhere

import fftgrad as fg
from fftgrad.ops import _collectives

WORKERS = 4
DENSE, NONE = fg.AllReduce(), fg.NoMemory()
GRADS = np.random.default_rng(0).standard_normal((WORKERS, 50)).astype(np.float32)


def mean_of(tx, mode="vmap"):
    def mean(grad, weight):
        return tx.update(grad, tx.init(grad), weight=weight)[0]

    return everywhere(mode, mean, WORKERS)


def pmean(exchange=DENSE, memory=NONE, **kwargs):
    return fg.compressed_pmean(exchange, memory, axis_name=AXIS, **kwargs)


@functools.cache
def dense():
    return mean_of(pmean())


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_is_the_weighted_one(mode):
    weights = np.array([3, 0, 1, 4], np.int32)
    expected = weights @ GRADS.astype(np.float64) / weights.sum()
    grads = GRADS.copy()
    grads[1] = np.nan  # without weight it may hold anything
    for row in np.asarray(mean_of(pmean(), mode)(grads, weights)):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


def test_equal_weights_change_nothing_and_none_is_zero():
    equal = dense()(GRADS, np.full(WORKERS, 64.0, np.float32))
    plain = everywhere("vmap", lambda g: jax.lax.pmean(g, AXIS), WORKERS)(GRADS)
    np.testing.assert_array_equal(equal, plain)
    np.testing.assert_array_equal(dense()(GRADS, np.zeros(WORKERS, np.float32)), 0)


def test_a_bad_weight_or_a_sum_beyond_float32_is_not_hidden():
    for bad in (-1.0, np.nan, np.inf):
        assert np.all(np.isnan(dense()(GRADS, np.array([1, bad, 1, 1], np.float32))))
    assert np.all(np.isnan(dense()(GRADS, np.full(WORKERS, 3e38, np.float32))))


def test_a_worker_without_weight_still_sends_what_it_kept():
    """Σ of the means and of what is left is Σ of the weighted gradients, with feedback."""
    tx = pmean(fg.AllGather(fg.TopK(k=5)), fg.ErrorFeedback())
    program = everywhere("vmap", lambda g, s, v: tx.update(g, s, weight=v), WORKERS)
    state = jax.jit(jax.vmap(tx.init))(GRADS)
    total, applied = np.zeros(50), np.zeros(50)
    rng = np.random.default_rng(1)
    for _ in range(12):
        grads = rng.standard_normal(GRADS.shape).astype(np.float32)
        weights = rng.integers(0, 3, WORKERS).astype(np.float32)
        mean, state = program(grads, state, weights)
        mean = np.asarray(mean)
        assert len({row.tobytes() for row in mean}) == 1
        applied += mean[0].astype(np.float64)
        total += weights @ grads.astype(np.float64) / max(weights.sum(), 1)
    left = np.asarray(state.memory.worker_rows.residual, np.float64)[:, 0].mean(0)
    np.testing.assert_allclose(applied + left, total, atol=1e-4)
    assert np.abs(left).max() > 0.1


def test_a_weight_takes_four_bytes_more():
    like, tx = jax.ShapeDtypeStruct((50,), "float32"), pmean(fg.AllGather(fg.Sign()))

    def sent(**weight):
        mean = lambda g: tx.update(g, tx.init(g), **weight)[0]  # noqa: E731
        found = _collectives.collectives(mean, {AXIS: WORKERS}, like)
        return [(c.kind, c.bytes) for c in found]

    assert sorted(sent(weight=jnp.float32(1))) == sorted([*sent(), ("all-reduce", 4)])


LIKE = {
    "w": jax.ShapeDtypeStruct((6, 8), "float32"),
    "scalar": jax.ShapeDtypeStruct((4,), "float32"),
}
VOTES, PARAMETERS = {"scale_by_datalens", "scale_by_majority_vote"}, {"beer", "choco_sgd"}
LOCAL = {"diloco", "sparse_loco"}
"""What has no weights; and what weighs at a meeting what a worker has changed since."""


QUICK = {"demo", "dgc", "scale_by_dion", "diloco", "feedback_adam", "sharded", "top_k"}
"""Methods that are more than one `compressed_pmean`, of which one row stands for the others."""
FIRST = QUICK | VOTES | PARAMETERS | {"scale_by_one_bit_adam"}


@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=SLOW) for n in METHODS]
)
def test_every_method_weighs_the_gradients_or_refuses(name):
    """As if each gradient had been multiplied by w v / Σ v, to the bit; and one of weight 0 is NaN.

    The gradients are short, because `dgc` clips them before they are weighed.
    """
    tx, kind = METHODS[name](AXIS), name.split()[0]

    def trained(grads, weight):
        params = jax.tree.map(jnp.ones_like, grads)
        state = tx.init(params)
        for _ in range(2 if kind in LOCAL else 1):
            moves, state = tx.update(grads, state, params, weight=weight)
            params = optax.apply_updates(params, moves)
        return params

    run = everywhere("vmap", trained, WORKERS)
    grads = jax.tree.map(lambda g: g / 256, gradients(LIKE, WORKERS))
    equal, weights = np.ones(WORKERS, np.float32), np.float32([1, 2, 1, 0])
    if kind in VOTES | PARAMETERS:
        with pytest.raises(ValueError, match=r"update\(weight\): must be left out"):
            jax.eval_shape(run, grads, weights)
        return
    expected = run(jax.tree.map(lambda g: np.stack([g[0], 2 * g[1], g[2], 0 * g[3]]), grads), equal)
    unweighted = run(grads, equal)
    if kind not in LOCAL:
        for leaf in grads.values():
            leaf[3] = np.nan
    found = run(grads, weights)
    # What was learned in two steps is added up before it is weighed, or after.
    bound = 2.0**-23 if kind in LOCAL else 0
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=bound)
    jax.tree.map(close, found, expected)
    assert not jax.tree.all(jax.tree.map(np.array_equal, found, unweighted))


def test_a_loss_that_is_watched_is_weighed_too():
    """A worker without examples has none: 0/0; that of a bad step is not seen."""
    ladder = fg.exchanges.Ladder((fg.AllGather(fg.TopK(k=5)), DENSE))
    tx = fg.methods.recover_by_loss(pmean(ladder), 9.0, 0.0, axis_name=AXIS)
    weights = np.float32([3, 1, 1, 0])
    run = everywhere(
        "vmap", lambda g, s, v, loss: tx.update(g, s, weight=v, value=loss)[1], WORKERS
    )
    state = jax.jit(jax.vmap(tx.init))(GRADS)
    bad = GRADS.copy()
    bad[1] = np.nan
    for grads, losses, expected in (
        (GRADS, [2.0, 1.0, 1.0, np.nan], 8 / 5),
        (bad, [1.0, np.nan, 2.0, np.nan], 8 / 5),
        (GRADS, [1.0, 2.0, 3.0, np.nan], 8 / 5),
    ):
        state = run(grads, state, weights, np.float32(losses))
        np.testing.assert_allclose(state.loss, expected, rtol=1e-6)
    assert np.all(np.asarray(state.inner.exchange[0].shared.level) == 0)


def test_dtypes_stay_and_scalars_are_wanted():
    half = GRADS.astype("bfloat16")
    assert jax.eval_shape(dense(), half, np.ones(WORKERS)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"weight=mask\.sum\(\)"):
        jax.eval_shape(dense(), half, np.ones((WORKERS, 3)))
