"""A residual in bfloat16, rounded by chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, TREE, gradients, values
from parallel import AXIS, everywhere

import fftgrad as fg

WORKERS = 4
LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
TOP_K = fg.AllGather(fg.TopK(fraction=0.1))
NARROW = fg.ErrorFeedback(dtype="bfloat16")


def run(tx, steps, *, mode="shard_map", like=LIKE):
    """What is applied in each step, the gradients, and the last state, of all workers."""
    grads = [gradients(like, WORKERS, seed=step) for step in range(steps)]
    start = jax.tree.map(jnp.zeros_like, jax.tree.map(lambda g: g[0], grads[0]))
    state = everywhere("vmap", lambda _: tx.init(start), WORKERS)(jnp.zeros(WORKERS))
    update = everywhere(mode, lambda g, s: tx.update(g, s), WORKERS)
    applied = []
    for grad in grads:
        mean, state = update(grad, state)
        applied.append(mean)
    return applied, grads, state


def flat(tree):
    """All values of each worker in float64, a row each."""
    rows = [np.asarray(leaf, np.float64).reshape(WORKERS, -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(rows, axis=1)


# In bfloat16


def test_by_default_nothing_is_different():
    memory = fg.ErrorFeedback()
    state = memory.init(LIKE)
    assert type(state).__name__ == "ErrorFeedbackState"
    assert state.rounds is None
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype("float32")}
    assert repr(memory) == "ErrorFeedback()"
    assert memory == fg.ErrorFeedback(dtype="float32")


def test_a_value_takes_two_bytes_and_the_wire_carries_what_it_did():
    state = NARROW.init(LIKE)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.residual)} == {np.dtype("bfloat16")}
    assert state.rounds.dtype == np.int32
    tx, plain = (
        fg.compressed_pmean(TOP_K, memory, axis_name=AXIS)
        for memory in (NARROW, fg.ErrorFeedback())
    )
    grads = gradients(LIKE, WORKERS)

    def bytes_of(tx):
        def one(grad):
            return tx.update(grad, tx.init(grad))[0]

        step = everywhere("shard_map", one, WORKERS)
        return sum(c.bytes for c in fg.audit(step.lower(grads).compile()))

    assert bytes_of(tx) == bytes_of(plain)


@pytest.mark.parametrize("memory", [NARROW, fg.ErrorFeedback(beta=0.3, dtype="bfloat16")])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_a_residual_is_kept_on_average(memory, scale):
    """Over many counts the mean is x - sent, within 5 sigma, and with what was put back."""
    x = jnp.asarray(values((300,)) * np.float32(scale))
    lost = jnp.asarray(values((300,), seed=1) * np.float32(scale / 50))
    draws = 4000

    @jax.jit
    @jax.vmap
    def kept(count):
        state = memory.init(x)._replace(rounds=count)
        first = memory.update(x, x, x, state)
        return first.residual, memory.restore(lost, first).residual

    first, second = (np.asarray(k, np.float64) for k in kept(jnp.arange(draws)))
    u = memory.beta
    x, lost = np.asarray(x, np.float64), np.asarray(lost, np.float64)
    for found, wanted in ((first, u * x), (second, u * (x + lost))):
        sigma = found.std(axis=0) / np.sqrt(draws)
        bound = 5 * sigma + 1e-6 * np.abs(wanted)  # what is rounded is rounded to float32 before
        assert np.all(np.abs(found.mean(axis=0) - wanted) <= bound)
    assert np.all(np.abs(first - u * x) <= 1.001 * 2**-7 * np.abs(u * x))


def test_draws_differ_between_counts_positions_leaves_and_workers():
    x = jnp.full(4096, 1 + 2.0**-9, jnp.float32)  # a quarter of the way up
    rows = [np.asarray(NARROW.update(x, x, x, NARROW.init(x)._replace(rounds=c)).residual)
            for c in map(jnp.int32, range(3))]  # fmt: skip
    up = [row.astype(np.float32) > 1 for row in rows]
    other = x * np.float32(1 + 2.0**-16)
    up.append(np.asarray(NARROW.update(other, other, x, NARROW.init(x)).residual) > 1)
    for one in up:
        assert abs(one.mean() - 0.25) <= 5 * np.sqrt(0.25 * 0.75 / 4096)
    for i in range(len(up)):
        for j in range(i):
            assert abs(np.corrcoef(up[i], up[j])[0, 1]) <= 5 / np.sqrt(4096)


def test_what_is_too_small_for_the_nearest_gets_in_by_chance():
    """A gradient of 1/1000 of the residual, 2000 times: to the nearest, it would stay at 1."""
    grads = jnp.full(500, 1e-3, jnp.float32)

    def step(state, _):
        x, state = NARROW.add(grads, state)
        return NARROW.update(x, x, x, state), None

    start = NARROW.init(grads)._replace(residual=jnp.ones(500, jnp.bfloat16))
    state, _ = jax.lax.scan(step, start, length=2000)
    np.testing.assert_allclose(np.asarray(state.residual, np.float64).mean(), 3.0, rtol=0.01)


@pytest.mark.parametrize("mode", ["shard_map", "shard_map unchecked", "vmap"])
def test_applied_and_kept_add_up_to_the_gradients_but_for_the_rounding(mode):
    tx = fg.compressed_pmean(TOP_K, NARROW, axis_name=AXIS)
    applied, grads, state = run(tx, 40, mode=mode)
    assert np.asarray(state.memory.worker_rows.rounds).ravel().tolist() == [40] * WORKERS
    kept = flat(jax.tree.map(lambda r: r[:, 0], state.memory.worker_rows.residual)).mean(0)
    gap = sum(flat(mean)[0] for mean in applied) + kept - sum(flat(g) for g in grads).mean(0)
    # Each step rounds by at most 2^-8 on average, and by chance: the errors add up as a walk.
    largest = max(np.linalg.norm(flat(g)) for g in grads)
    assert 0 < np.linalg.norm(gap) <= 2**-8 * np.sqrt(40) * 5 * largest


@pytest.mark.parametrize(
    "name", ["gather blocked", "two stages", "low rank", "low rank in turns", "integer sum"]
)
def test_it_works_with_leaves_in_bfloat16_in_every_kind_of_exchange(name):
    """There `restore` rounds once more in each step."""
    tx = fg.compressed_pmean(EXCHANGES[name], NARROW, axis_name=AXIS)
    applied, _, state = run(tx, 6, like=TREE)
    assert all(np.all(np.isfinite(np.asarray(a, np.float32))) for a in jax.tree.leaves(applied))
    assert np.asarray(state.memory.worker_rows.rounds).ravel().tolist() == [12] * WORKERS
    assert np.asarray(state.skipped).tolist() == [0] * WORKERS


def test_a_step_that_is_not_finite_leaves_it_as_it_was():
    tx = fg.compressed_pmean(TOP_K, NARROW, axis_name=AXIS)
    *_, state = run(tx, 3)
    bad = jax.tree.map(lambda g: g.at[1].set(jnp.nan), gradients(LIKE, WORKERS))
    _, after = everywhere("shard_map", lambda g, s: tx.update(g, s), WORKERS)(bad, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, state.memory, after.memory))


@pytest.mark.parametrize("dtype", ["float16", "int8", jnp.bfloat16])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"ErrorFeedback\(dtype\).*use 'float32'"):
        fg.ErrorFeedback(dtype=dtype)
