"""A state knows its worker: another's is found, and the mean of all poisoned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import EXCHANGES, MEMORIES, gradients, sample
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of, train_step
from updates import PAIR, WORKERS, mapped

import fftgrad as fg

LIKE = {"w": jnp.zeros((5, 8)), "b": jnp.zeros(3)}
SPARSE = fg.AllGather(fg.TopK(fraction=0.2))


def grads(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.standard_normal((WORKERS, *p.shape)).astype(np.float32), LIKE)


def is_own(node):
    return isinstance(node, fg.exchanges.PerWorker)


def rows(state, change):
    """The state with other rows, sharded as it was."""
    return jax.tree.map(
        lambda node: (
            jax.tree.map(lambda a: jax.device_put(change(a), a.sharding), node)
            if is_own(node)
            else node
        ),
        state,
        is_leaf=is_own,
    )


WRONG = {
    "worker 0's on all": lambda a: jnp.repeat(jnp.asarray(np.asarray(a)[:1]), WORKERS, 0),
    "another order": lambda a: np.asarray(a)[[1, 0, 2, 3]],
    "shifted": lambda a: np.roll(np.asarray(a), 1, 0),
}
WITH_MEMORY = [name for name in MEMORIES if not isinstance(MEMORIES[name], fg.NoMemory)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_state_of_another_worker_poisons_the_mean(check_vma, wrong):
    tx = fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name=AXIS)
    init, update = train_step(tx, WORKERS, check_vma=check_vma, like=LIKE)
    state = init(LIKE)
    assert state.worker.worker_rows.tolist() == [[-1, -1]] * WORKERS
    for seed in range(2):
        mean, state = update(grads(seed), state)
        assert state.worker.worker_rows.tolist() == [[i, 4] for i in range(4)]
        assert int(state.skipped) == 0
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(mean))

    back = rows(state, lambda a: np.asarray(a).copy())  # as it was: nothing happens
    fine, _ = update(grads(2), back)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(fine))

    bad = rows(state, wrong)
    for count in (1, 2):  # and it stays so
        before = bad
        mean, bad = update(grads(2), bad)
        assert int(bad.skipped) == count
        assert any(np.any(np.isnan(leaf)) for leaf in jax.tree.leaves(mean))
        for a, b in zip(jax.tree.leaves(before.memory), jax.tree.leaves(bad.memory), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_every_exchange_passes_it_on(name):
    init, run = mapped(EXCHANGES[name])
    first, second = (gradients(PAIR, WORKERS, seed) for seed in range(2))
    _, state = run(first, init(first))
    _, good = run(second, state)
    assert good.skipped.tolist() == [0] * WORKERS
    # As pmap's unreplicate does.
    copy = jax.tree.map(lambda a: np.repeat(np.asarray(a)[:1], WORKERS, 0), state)
    mean, bad = run(second, copy)
    assert bad.skipped.tolist() == [1] * WORKERS
    assert any(np.any(~np.isfinite(leaf)) for leaf in jax.tree.leaves(mean))


def test_unreplicating_is_found():
    tx = fg.compressed_pmean(fg.methods.top_k(fraction=0.2), axis_name=AXIS)
    run = jax.pmap(tx.update, axis_name=AXIS, devices=jax.devices()[:WORKERS])
    everywhere = functools.partial(
        jax.tree.map, lambda a: jnp.broadcast_to(a, (WORKERS, *jnp.shape(a)))
    )
    _, state = run(grads(0), everywhere(tx.init(LIKE)))  # as pmap's replicate, which is right
    assert state.skipped.tolist() == [0] * WORKERS
    _, state = run(grads(1), everywhere(jax.tree.map(lambda a: np.asarray(a)[0], state)))
    assert state.skipped.tolist() == [1] * WORKERS


def test_a_replicated_state_is_found_once_it_was_saved():
    """Made outside, P() for all of it, nothing checked: each device has other contents."""
    tx = optax.chain(fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name=AXIS))
    mesh = mesh_of(WORKERS)

    def step(rows, state):
        return tx.update(jax.tree.map(lambda g: g[0], rows), state)

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(), check_vma=False)
    )
    state = tx.init(LIKE)
    for seed in range(3):
        _, state = run(grads(seed), state)
    assert int(state[0].skipped) == 0
    saved = jax.tree.map(np.asarray, state)
    restored = jax.device_put(saved, NamedSharding(mesh, P()))
    mean, state = run(grads(3), restored)
    assert int(state[0].skipped) == 1
    assert np.isnan(mean["w"]).any()
    # What JAX can check it refuses in the first step.
    checked = jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(checked, grads(0), tx.init(LIKE))


def test_nothing_is_kept_where_no_worker_has_anything_of_its_own():
    tx = fg.compressed_pmean(SPARSE, axis_name=AXIS)
    assert jax.tree.leaves(tx.init(LIKE).worker) == []
    tx = fg.compressed_pmean(fg.AllGather(fg.Threshold(fraction=0.1, reuse=2)), axis_name=AXIS)
    assert tx.init(LIKE).worker.worker_rows.tolist() == [[-1, -1]]


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_it_changes_no_bit(name):
    """Not that of a negative zero either."""
    tx = fg.compressed_pmean(fg.AllReduce(), MEMORIES[name], axis_name=AXIS)
    zeros = jax.tree.map(lambda g: -0.0 * np.abs(g), grads(0))
    run = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))
    silent = tx.init(LIKE)._replace(worker=fg.exchanges.PerWorker(()))
    without = jax.jit(jax.vmap(lambda g: tx.update(g, silent)[0], axis_name=AXIS))
    for batch in (zeros, grads(1)):
        for a, b in zip(jax.tree.leaves(run(batch)), jax.tree.leaves(without(batch)), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
