"""What is done with a gradient that is not finite: it is seen, or its step is skipped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import EXCHANGES, HIERARCHIES, gradients, sample, values
from parallel import AXIS
from updates import PAIR, WORKERS, collectives, mapped

import fftgrad as fg
from fftgrad.training import _pmean

ALL = pytest.mark.parametrize("name", sample(EXCHANGES))


def grads(seed=0):
    return gradients(PAIR, WORKERS, seed=seed)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def is_zero(tree):
    return all(not np.any(leaf) for leaf in jax.tree.leaves(tree))


@ALL
def test_where_all_is_finite_the_policies_agree_to_the_bit(name):
    found = []
    for policy in ("propagate", "skip"):
        init, update = mapped(EXCHANGES[name], policy)
        state = init(grads())
        for seed in range(2):
            mean, state = update(grads(seed), state)
        found.append((mean, state))
    assert same(found[0], found[1])
    assert not np.any(state.skipped)


@ALL
def test_a_skipped_step_is_zero_and_leaves_no_trace(name):
    init, update = mapped(EXCHANGES[name], "skip")
    _, before = update(grads(), init(grads()))
    bad = grads(1) | {"b": grads(1)["b"].at[2, 3, 3].set(np.nan)}
    mean, after = update(bad, before)
    assert is_zero(mean)
    assert same((before.memory, before.exchange), (after.memory, after.exchange))
    assert same(before.overflow, after.overflow)
    assert np.all(after.skipped == 1)


@pytest.mark.parametrize("name", HIERARCHIES)
def test_a_hierarchy_skips_the_step_of_any_of_its_workers(name):
    exchange = dataclasses.replace(HIERARCHIES[name], memory=fg.NoMemory())
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"), non_finite="skip")
    one = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="fast")
    rows = jnp.asarray(values((2, 4, 60)))
    mean, state = jax.jit(jax.vmap(one, axis_name="slow"))(rows.at[1, 2, 7].set(np.nan))
    assert is_zero(mean)
    assert np.all(state.skipped == 1)


@pytest.mark.parametrize("name", ["gather top-k", "dense"])
def test_to_skip_costs_no_byte(name):
    plain, skip = (
        collectives(EXCHANGES[name], policy, bucketing=fg.Bucketing("leaf"))
        for policy in ("propagate", "skip")
    )
    assert [c.kind for c in plain] == [c.kind for c in skip]
    assert sum(c.bytes for c in skip) == sum(c.bytes for c in plain)


def test_a_mean_beyond_a_leaf_is_skipped():
    init, update = mapped(fg.AllReduce(), "skip")
    rows = {"w": jnp.full((WORKERS, 3), 6e4, jnp.float16)}
    state = init(rows)
    held = jax.tree.map(lambda a: a + 6e4, state.memory)
    mean, after = update(rows, state._replace(memory=held))
    assert is_zero(mean)
    assert np.all(after.skipped == 1)
    assert same(after.memory, held)


def test_what_comes_behind_sees_zeros_or_a_mean_that_is_not_finite():
    """`apply_if_finite` finds nothing behind a policy; Adam's moments decay in a skipped step."""
    moments = {}
    for policy in ("propagate", "skip"):
        tx = optax.chain(
            fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS, non_finite=policy),
            optax.apply_if_finite(optax.scale_by_adam(), 9),
        )
        update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
        rows = jnp.asarray(values((WORKERS, 20)))
        _, state = update(rows, jax.jit(jax.vmap(tx.init))(rows))
        out, state = update(rows.at[2, 3].set(np.nan), state)
        moments[policy] = np.asarray(state[1].inner_state.mu[0])
        assert np.all(np.isfinite(out))
        assert np.all(np.asarray(state[1].total_notfinite) == (policy == "propagate"))
    mu = 0.1 * np.asarray(rows).mean(0)
    np.testing.assert_allclose(moments["propagate"], mu, rtol=1e-5)
    np.testing.assert_allclose(moments["skip"], 0.9 * mu, rtol=1e-5)


def test_a_count_over_model_shards_stays_positive():
    most = jnp.full(8, 2**31 - 1, jnp.int32)
    found = jax.vmap(lambda own: _pmean._sum(own, ("model",)), axis_name="model")(most)
    assert np.all(found == (2**31 - 1) // 8 * 8)
