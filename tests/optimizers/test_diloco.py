"""Local steps, and an outer step on what they changed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of
from stepwise import run

import fftgrad as fg

WORKERS, N = 4, 40
TARGET = np.linspace(-1, 1, N).astype(np.float32)
DENSE = (fg.AllReduce(), fg.NoMemory())


@functools.cache
def compiled(tx, check_vma):
    """`init` and a step in which each worker has parameters of its own, in rows."""
    specs = fg.state_specs(jax.eval_shape(tx.init, {"w": np.zeros(N)}), AXIS)
    wrap = functools.partial(jax.shard_map, mesh=mesh_of(WORKERS), check_vma=check_vma)

    def step(rows, state, x):
        own = jax.tree.map(lambda p: p[0], rows)
        grad = jax.grad(lambda p: jnp.mean((x[0] @ (p["w"] - TARGET)) ** 2))(own)
        updates, state = tx.update(grad, state, own)
        return jax.tree.map(lambda p: p[None], optax.apply_updates(own, updates)), state

    init = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))
    return init, jax.jit(wrap(step, in_specs=(P(AXIS), specs, P(AXIS)), out_specs=(P(AXIS), specs)))


def train(tx, steps, check_vma=True, bad_step=None):
    init, step = compiled(tx, check_vma)
    rows = NamedSharding(mesh_of(WORKERS), P(AXIS))
    state = init({"w": np.zeros(N, np.float32)})
    params = jax.device_put({"w": np.zeros((WORKERS, N), np.float32)}, rows)
    rng = np.random.default_rng(0)
    for count in range(steps):
        x = rng.standard_normal((WORKERS, 16, N)).astype(np.float32)
        if count == bad_step:
            x[1] = np.inf
        x = jax.device_put(x, rows)
        params, state = step(params, state, x)
    return params["w"], state, step, x


def test_compressed_it_gets_there_at_a_fraction_of_the_bytes():
    codec = fg.AllGather(fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=4)))
    tx = fg.optimizers.diloco(optax.sgd(0.02), optax.sgd(1.0), 4, codec)
    params, state, step, x = train(tx, 120)
    for leaf in jax.tree.leaves(state.anchor):
        shards = [np.asarray(s.data).tobytes() for s in leaf.addressable_shards]
        assert len(set(shards)) == 1
    assert np.max(np.abs(np.asarray(state.anchor["w"]) - TARGET)) < 0.1
    # The workers' parameters are the anchor, up to the rounding of one addition.
    np.testing.assert_allclose(params, np.tile(state.anchor["w"], (WORKERS, 1)), atol=1e-6)
    assert step._cache_size() == 1
    found = fg.audit(step.lower({"w": params}, state, x).compile())
    assert sum(c.bytes for c in found) == fg.wire_bytes(codec, {"w": np.zeros(N, np.float32)})
    assert {c.branch for c in found} == {(1,)}


def test_a_bad_gradient_is_one_inner_step_of_one_worker():
    tx = fg.optimizers.diloco(optax.sgd(0.02, momentum=0.9), optax.sgd(1.0), 4, *DENSE)
    before, start, *_ = train(tx, 6)
    after, state, *_ = train(tx, 7, bad_step=6)
    before, after, start, state = jax.device_get((before, after, start, state))
    stays = np.all(np.asarray(before) == np.asarray(after), axis=1)
    assert stays.tolist() == [False, True, False, False]
    for old, new in zip(*map(jax.tree.leaves, (start.inner, state.inner)), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
    assert state.skipped.worker_rows.tolist() == [0, 1, 0, 0]
    _, state, *_ = train(tx, 8, bad_step=7)  # also where they meet
    assert not np.array_equal(state.anchor["w"], start.anchor["w"])
    assert [int(one.skipped) for one in state.pmean] == [0]


HIDDEN = {
    "a NaN that inner hides": (optax.chain(optax.zero_nans(), optax.sgd(0.1)), np.nan),
    "a move that is not finite": (optax.scale(1e30), 1e30),
    "a parameter beyond float32": (optax.scale(1.0), 3e38),
}


@pytest.mark.parametrize(("inner", "grad"), HIDDEN.values(), ids=HIDDEN)
def test_an_inner_step_is_bad_by_its_gradient_or_its_result(inner, grad):
    tx = fg.optimizers.diloco(inner, optax.sgd(1.0), 2, *DENSE)
    params = np.full((WORKERS, N), 1e38, np.float32)
    grads = np.zeros((WORKERS, N), np.float32)
    grads[1, 3] = grad
    step = lambda g, p: tx.update(g, tx.init(p), p)  # noqa: E731
    moves, state = jax.jit(jax.vmap(step, axis_name=AXIS))(grads, params)
    assert not np.any(np.asarray(moves))
    assert state.skipped.worker_rows.ravel().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_inner_optimizer_may_have_collectives(check_vma):
    """All workers take part in them, also where one of them leaves out the step."""
    clip = optax.stateless(lambda g, _: jax.tree.map(lambda a: a * tanh_of_mean(a), g))
    tx = fg.optimizers.diloco(optax.chain(clip, optax.sgd(0.02)), optax.sgd(1.0), 4, *DENSE)
    params, state, *_ = train(tx, 8, check_vma, bad_step=2)
    assert np.all(np.isfinite(np.asarray(params)))
    assert state.skipped.worker_rows.tolist() == [1] * WORKERS


def tanh_of_mean(leaf):
    return jnp.tanh(jax.lax.pmean(jnp.mean(jnp.abs(leaf)), AXIS))


def test_all_pieces_of_a_worker_leave_out_a_bad_step():
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    tx = fg.optimizers.diloco(optax.sgd(1.0), optax.sgd(1.0), 4, *DENSE)
    state = fg.init_state(tx, {"w": np.zeros(8, np.float32)}, mesh, AXIS, {"w": P("model")})
    specs, rows = fg.state_specs(state, AXIS, {"w": P("model")}), P(AXIS, "model")

    def step(grads, state):
        moves, _ = tx.update({"w": grads[0]}, state, {"w": jnp.zeros_like(grads[0])})
        return moves["w"][None]

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(rows, specs), out_specs=rows))
    grads = np.ones((2, 8), np.float32)
    grads[1, 3] = np.nan
    moves = step(grads, state)
    np.testing.assert_array_equal(moves, [[-1.0] * 8, [0.0] * 8])


def test_the_loss_of_a_bad_step_does_not_count_at_a_meeting():
    """For the outer optimizer, which would remember a NaN."""
    exchange = fg.AllGather(fg.TopK(k=5))
    outer = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
    tx = fg.optimizers.diloco(optax.sgd(0.02), outer, 2, exchange, fg.NoMemory())
    for many in (1, WORKERS):
        bad = (np.arange(WORKERS) < many) & (np.arange(4) == 1)[:, None]
        grads = np.where(bad[..., None], np.float32(np.nan), -TARGET)
        loss = np.where(bad, np.nan, 1.0).astype(np.float32)
        _, states = run(tx, grads, np.zeros(N, np.float32), value=loss)
        np.testing.assert_array_equal(states.outer[0][1].best_value[-1], 1.0)
        assert np.all(np.isfinite(states.outer[0][1].avg_value[-1]))


@pytest.mark.parametrize(
    ("every", "delay", "fragments"), [(3, 0, 1), (4, 0, 1), (3, 1, 1), (6, 0, 2)]
)
def test_meetings_keep_their_period_after_the_largest_int32_step(every, delay, fragments):
    tx = fg.optimizers.diloco(
        optax.sgd(0.0), optax.sgd(0.0), every, *DENSE, overlap_steps=delay, fragments=fragments
    )
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    zeros, start = dict.fromkeys("ab", np.zeros((1, 2), np.float32)), 2**31 - 5
    ones, back_at = jax.tree.map(np.ones_like, zeros), {}
    state = jax.jit(jax.vmap(tx.init))(zeros)._replace(step=np.full(1, start, np.int32))
    for number in range(start + 1, start + 12):
        moves, state = update(zeros, state, ones)
        back = [value == -1 for move in moves.values() for value in np.ravel(move)]  # to anchor
        place = (number - delay) % every
        assert any(back) == (place % (every // fragments) == 0)
        assert back == back_at.setdefault(place, back)  # the same fragment


def test_parameters_are_asked_for():
    tx = fg.optimizers.diloco(optax.sgd(0.1), optax.sgd(0.1), 2)
    step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name=AXIS)
    with pytest.raises(ValueError, match=r"diloco\.update\(params\)"):
        jax.eval_shape(step, np.ones((2, 3)))


def test_a_worker_without_parameters_of_its_own_is_told_how_to_have_them():
    """Inside of optax it would end in branches of a cond that differ in their types."""
    inner = optax.apply_if_finite(optax.adam(0.1), 9)
    tx = fg.optimizers.diloco(inner, optax.sgd(0.7), 2, *DENSE)
    state = fg.init_state(tx, np.zeros(N, np.float32), mesh_of(WORKERS), AXIS)
    specs = fg.state_specs(state, AXIS)

    def step(w, state, x):
        updates, state = tx.update(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), state, w)
        return w + updates, state

    mapped = jax.shard_map(
        step, mesh=mesh_of(WORKERS), in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs)
    )
    match = r"diloco\.update\(params\): must be this worker's own.*leading axis of workers"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(mapped, np.zeros(N), state, np.ones((8, N)))
