"""Workers that count by their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parallel import AXIS, MODES, everywhere

import fftgrad as fg

WORKERS = 4
DENSE, NONE = fg.AllReduce(), fg.NoMemory()
GRADS = np.random.default_rng(0).standard_normal((WORKERS, 50)).astype(np.float32)


def mean_of(tx, mode="vmap"):
    def mean(grad, weight):
        return tx.update(grad, tx.init(grad), weight=weight)[0]

    return everywhere(mode, mean, WORKERS)


def chained(exchange=DENSE, memory=NONE):
    return optax.chain(fg.weigh(AXIS), fg.compressed_pmean(exchange, memory, axis_name=AXIS))


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_is_the_weighted_one(mode):
    weights = np.array([3, 0, 1, 4], np.int32)
    expected = weights @ GRADS.astype(np.float64) / weights.sum()
    for row in mean_of(chained(), mode)(GRADS, weights):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


def test_equal_weights_change_nothing():
    equal = mean_of(chained())(GRADS, np.full(WORKERS, 64.0, np.float32))
    plain = everywhere("vmap", lambda g: jax.lax.pmean(g, AXIS), WORKERS)(GRADS)
    np.testing.assert_array_equal(equal, plain)


def test_a_worker_without_weight_may_hold_anything():
    grads = GRADS.copy()
    grads[1] = np.nan
    weights = np.array([1, 0, 1, 2], np.float32)
    found = mean_of(chained())(grads, weights)
    expected = weights[[0, 2, 3]] @ GRADS[[0, 2, 3]].astype(np.float64) / 4
    for row in found:
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


def test_nobody_has_anything():
    np.testing.assert_array_equal(mean_of(chained())(GRADS, np.zeros(WORKERS, np.float32)), 0)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_bad_weight_is_not_hidden(bad):
    weights = np.array([1, bad, 1, 1], np.float32)
    assert np.all(np.isnan(mean_of(chained())(GRADS, weights)))


def test_a_worker_without_weight_still_sends_what_it_kept():
    """Σ of the means and of what is left is Σ of the weighted gradients, with feedback."""
    tx = chained(fg.AllGather(fg.TopK(k=5)), fg.ErrorFeedback())
    program = everywhere("vmap", lambda g, s, v: tx.update(g, s, weight=v), WORKERS)
    state = jax.vmap(tx.init)(GRADS)
    total, applied = np.zeros(50), np.zeros(50)
    rng = np.random.default_rng(1)
    for _ in range(12):
        grads = rng.standard_normal(GRADS.shape).astype(np.float32)
        weights = rng.integers(0, 3, WORKERS).astype(np.float32)
        mean, state = program(grads, state, weights)
        assert len({row.tobytes() for row in np.asarray(mean)}) == 1
        applied += np.asarray(mean[0], np.float64)
        total += weights @ grads.astype(np.float64) / max(weights.sum(), 1)
    left = np.asarray(state[1].memory.value.residual, np.float64)[:, 0].mean(0)
    np.testing.assert_allclose(applied + left, total, atol=1e-4)
    assert np.abs(left).max() > 0.1


def test_dtypes_stay_and_scalars_are_wanted():
    tx = fg.weigh(AXIS)
    half = jnp.asarray(GRADS, jnp.bfloat16)
    run = everywhere("vmap", lambda g, v: tx.update(g, tx.init(g), weight=v)[0], WORKERS)
    assert run(half, jnp.ones(WORKERS)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"weight=mask\.sum\(\)"):
        run(half, jnp.ones((WORKERS, 3)))
    with pytest.raises(ValueError, match="weight=tokens"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(half)
