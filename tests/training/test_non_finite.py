"""What is done with a gradient that is not finite: it is seen, or its step is skipped."""

import jax
import numpy as np
import optax
import pytest
from cases import EXCHANGES, HIERARCHIES, gradients, sample, values
from parallel import AXES, AXIS, same, two_axes
from updates import BUCKETS, PAIR, WORKERS, collectives, mapped

import fftgrad as fg


def grads(seed=0):
    return jax.tree.map(np.array, gradients(PAIR, WORKERS, seed=seed))


def is_zero(tree):
    return all(not np.any(leaf) for leaf in jax.tree.leaves(tree))


ADAPTIVE = {
    "adacomp": fg.AllGather(fg.codecs.AdaComp(bin_size=20)),
    "reused threshold": fg.AllGather(fg.Threshold(fraction=0.1, reuse=3)),
    "threshold of a leader": fg.LeaderTopK(fg.Threshold(fraction=0.1, reuse=3)),
    "two stages of one side": fg.TwoStage(
        fg.chain(fg.codecs.AlternatingSign(), fg.TopK(k=8)), workers=WORKERS
    ),
    "two stages of bins": fg.TwoStage(fg.codecs.AdaComp(bin_size=8), workers=WORKERS),
    "ladder of two stages": fg.Ladder((fg.TwoStage(fg.Sign(), workers=WORKERS),)),
}
STATEFUL = {
    *("adacomp", "reused threshold", "threshold of a leader", "two stages of bins"),
    *("low rank", "low rank in turns"),
}


@pytest.mark.parametrize("name", [*sample(EXCHANGES), *ADAPTIVE])
def test_a_bad_step_leaves_no_trace_by_either_policy(name):
    """In no bucket; where all is finite, the policies agree to the bit."""
    found = []
    for policy in ("propagate", "skip"):
        init, update = mapped({**EXCHANGES, **ADAPTIVE}[name], policy, bucketing=BUCKETS)
        start = init(grads())
        _, before = update(grads(), start)
        if name in STATEFUL:  # or this would show nothing
            assert not same(start.exchange, before.exchange)
        found.append((before, update(grads(1), before)))
        assert not np.any(before.skipped)
        for leaf, bad in zip(PAIR, (np.nan, np.inf), strict=True):
            spoiled = grads(1)
            spoiled[leaf][2, 3, 5] = bad
            mean, after = update(spoiled, before)
            rows = [np.asarray(mean[name]).reshape(WORKERS, -1) for name in PAIR]
            rows = np.concatenate(rows, axis=1)
            is_seen = ~np.isfinite(rows).all(1) if policy == "propagate" else ~rows.any(1)
            assert is_seen.all()
            assert same((before.memory, before.exchange), (after.memory, after.exchange)), leaf
            assert policy == "propagate" or same(before.overflow, after.overflow)
            assert np.all(np.asarray(after.skipped) == 1)
    assert same(*found)


@pytest.mark.parametrize("name", sample(HIERARCHIES))
def test_a_bad_step_of_a_hierarchy_leaves_no_trace_by_either_policy(name):
    good = jax.tree.map(lambda a: np.array(a).reshape(2, 4, 8, 8), gradients(PAIR, 8))
    found = []
    for policy in ("propagate", "skip"):
        tx = fg.compressed_pmean(
            HIERARCHIES[name],
            axis_name=AXES,
            non_finite=policy,
            bucketing=fg.Bucketing("model", 256),
        )
        init, update = two_axes(tx.init), two_axes(lambda g, s, tx=tx: tx.update(g, s))
        _, before = update(good, init(good))
        found.append((before.memory, before.exchange))
        for leaf in PAIR:
            bad = {key: a.copy() for key, a in good.items()}
            bad[leaf][1, 2, 3, 5] = np.nan
            mean, after = update(bad, before)
            rows = np.concatenate([np.asarray(a).reshape(8, -1) for a in mean.values()], axis=1)
            assert is_zero(mean) if policy == "skip" else not np.isfinite(rows).all(1).any()
            assert np.all(np.asarray(after.skipped) == 1)
            assert same((before.memory, before.exchange), (after.memory, after.exchange)), leaf
    assert same(*found)


@pytest.mark.parametrize("name", ["gather top-k", "dense"])
def test_to_skip_costs_no_byte(name):
    plain, skip = (
        collectives(EXCHANGES[name], policy, bucketing=fg.Bucketing("leaf"))
        for policy in ("propagate", "skip")
    )
    assert [c.kind for c in plain] == [c.kind for c in skip]
    assert sum(c.bytes for c in skip) == sum(c.bytes for c in plain)


@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_a_mean_beyond_a_leaf_is_a_bad_step(policy):
    init, update = mapped(fg.AllReduce(), policy)
    rows = {"w": np.full((WORKERS, 3), 6e4, np.float16)}
    state = init(rows)
    held = jax.tree.map(lambda a: np.asarray(a) + np.float32(6e4), state.memory)
    mean, after = update(rows, state._replace(memory=held))
    assert mean["w"].dtype == np.float16
    assert is_zero(mean) if policy == "skip" else not np.isfinite(mean["w"]).all(1).any()
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
        rows = values((WORKERS, 20))
        bad = rows.copy()
        bad[2, 3] = np.nan
        _, state = update(rows, jax.jit(jax.vmap(tx.init))(rows))
        out, state = update(bad, state)
        moments[policy] = np.asarray(state[1].inner_state.mu[0])
        assert np.all(np.isfinite(out))
        assert np.all(np.asarray(state[1].total_notfinite) == (policy == "propagate"))
    mu = 0.1 * rows.mean(0)
    np.testing.assert_allclose(moments["propagate"], mu, rtol=1e-5)
    np.testing.assert_allclose(moments["skip"], 0.9 * mu, rtol=1e-5)
