"""compressed_pmean as an optax transformation: chains, states, errors, and training."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, EXCHANGES, MEMORIES, TREE, gradients, sample, values
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, MODES, everywhere, mesh_of, of_size, train_step, unshard
from updates import sharded

import fftgrad as fg
from fftgrad.training import _pmean

BLOCKED = fg.AllGather(CODECS["blocked"])


def one_update(tx):
    return lambda grad: tx.update(grad, tx.init(grad))[0]


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("mode", MODES)
def test_dense_is_pmean_on_any_tree(mode, workers):
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
    grads = gradients(TREE, workers)
    mean = everywhere(mode, one_update(tx), workers)(grads)
    for got, given in zip(jax.tree.leaves(mean), jax.tree.leaves(grads), strict=True):
        assert (got.shape, got.dtype) == (given.shape, given.dtype)
        expected = np.asarray(given, np.float64).mean(0)
        tolerance = 1e-6 if got.dtype == jnp.float32 else 2.0**-8
        np.testing.assert_allclose(
            np.asarray(got[0], np.float64), expected, rtol=tolerance, atol=1e-6
        )


ONE_OF_EACH = [*{type(e): name for name, e in EXCHANGES.items()}.values(), "gather stochastic"]
PAIRS = {
    **{f"{name}, feedback": (EXCHANGES[name], MEMORIES["feedback"]) for name in ONE_OF_EACH},
    **{f"blocked, {name}": (BLOCKED, memory) for name, memory in MEMORIES.items()},
}


@pytest.mark.parametrize(("exchange", "memory"), PAIRS.values(), ids=PAIRS)
def test_checked_or_not_the_steps_agree(exchange, memory):
    results = []
    for check_vma in (True, False):
        init, update = sharded(exchange, memory=memory, check_vma=check_vma, like=TREE, key=7)
        grads = gradients(TREE, 4)
        state = init(jax.tree.map(lambda g: g[0], grads))
        for _ in range(3):
            mean, state = update(grads, state)
        results.append((mean, state.memory.worker_rows))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_every_way_of_running_it_agrees_with_feedback():
    tx = fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS)

    def twice(grad):
        _, state = tx.update(grad, tx.init(grad))
        mean, state = tx.update(grad, state)
        return mean, state.memory.worker_rows

    grads = gradients({"w": jax.ShapeDtypeStruct((90,), "float32")}, 4)
    results = [everywhere(mode, twice, 4)(grads) for mode in MODES]
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


FEW = fg.AllGather(fg.TopK(fraction=0.2))


def of_twice(exchange, x, state, comm):
    """What an exchange makes of twice the gradient, halved."""
    out = exchange.mean(jax.tree.map(lambda a: 2 * a, x), state, comm)
    mean, error = (jax.tree.map(lambda a: a / 2, tree) for tree in (out.mean, out.error))
    return out._replace(mean=mean, error=error)


@dataclasses.dataclass(frozen=True)
class Around(fg.Exchange):
    """An exchange in one of one's own."""

    def init(self, like):
        return FEW.init(like)

    def mean(self, x, state, comm):
        return of_twice(FEW, x, state, comm)

    def wire_bytes(self, like):
        return FEW.wire_bytes(like)


@dataclasses.dataclass(frozen=True)
class Heir(fg.AllGather):
    """One that inherits all but its mean."""

    def mean(self, x, state, comm):
        return of_twice(super(), x, state, comm)


class Record(fg.NoMemory):
    """A memory of all that was sent."""

    def init(self, like):
        return jax.tree.map(jnp.zeros_like, like)

    def update(self, x, error, mean, state):
        return jax.tree.map(lambda total, x, error: total + (x - error), state, x, error)


def few_steps(exchange, memory):
    """What is applied in three steps, the gradients, and what the memory holds, of all workers."""
    tx = fg.compressed_pmean(exchange, memory, axis_name=AXIS)
    rows = [gradients(jax.ShapeDtypeStruct((50,), "float32"), 4, seed=seed) for seed in range(3)]

    def run(*grads):
        state, means = tx.init(grads[0]), 0.0
        for grad in grads:
            mean, state = tx.update(grad, state)
            means += mean
        return means, state.memory.worker_rows

    means, held = jax.jit(jax.vmap(run, axis_name=AXIS))(*rows)
    return means[0], sum(rows), held


@pytest.mark.parametrize("exchange", [FEW, Around(), Heir(FEW.codec)], ids=repr)
def test_exchanges_of_ones_own_lose_nothing(exchange):
    applied, grads, held = few_steps(exchange, fg.ErrorFeedback())
    (residual,) = jax.tree.leaves(held)
    left = np.asarray(residual).reshape(4, -1).mean(0)
    np.testing.assert_allclose(applied + left, grads.mean(0), atol=1e-6)


def test_memories_of_ones_own_see_what_was_sent():
    applied, _, held = few_steps(FEW, Record())
    np.testing.assert_allclose(held.reshape(4, -1).mean(0), applied, atol=1e-6)


FEEDS_BACK = dict.fromkeys(
    [
        *ONE_OF_EACH,
        *("spectral sum", "gather top-k", "gather blocked", "gather adaptive"),
        *("shared support", "shared frequencies", "two stages, top-k"),
    ]
)


def flat(tree, axes=0):
    """All values as one vector, behind these axes."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([a.reshape(*a.shape[:axes], -1) for a in leaves], axis=axes)


@pytest.mark.parametrize("exchange", [EXCHANGES[n] for n in FEEDS_BACK], ids=FEEDS_BACK)
def test_error_feedback_loses_nothing(exchange):
    """Sum of what was applied + mean residual = sum of the mean gradients.

    The second loss of two stages is in the residuals of the shards' owners.
    """
    init, update = sharded(exchange, like=TREE, key=7)
    state = init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), TREE))
    applied = wanted = 0.0
    for step in range(6):
        grads = gradients(TREE, 4, seed=step)
        mean, state = update(grads, state)
        applied += flat(mean)
        wanted += flat(grads, 1).mean(0)
    residual = flat(state.memory.worker_rows.residual, 1).mean(0)
    np.testing.assert_allclose(applied + residual, wanted, atol=1e-4)
    if exchange in (EXCHANGES["gather blocked"], EXCHANGES["gather top-k"]):
        assert np.linalg.norm(residual) > 0.1 * np.linalg.norm(wanted)


NARROW = {
    "dense": fg.AllReduce(),
    "gather": fg.AllGather(fg.TopK(fraction=0.3)),
    "low rank": fg.PowerSgd(rank=2),
    "low rank in turns": fg.AcpSgd(rank=2),
    "two stages": fg.TwoStage(fg.TopK(fraction=0.3), workers=4),
    "hierarchical": fg.Hierarchical("fast", 2, fg.AllGather(fg.TopK(fraction=0.3))),
}


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "dtype"), sample(itertools.product(NARROW, ["bfloat16", "float16"]), frozenset)
)
def test_what_rounding_drops_of_the_mean_is_not_lost(name, dtype, check_vma):
    """As above, over 200 steps whose means have 8 or 11 bits; float16 gradients are subnormal."""
    exchange = NARROW[name]
    fast = isinstance(exchange, fg.Hierarchical)
    axis = ("slow", "fast") if fast else AXIS
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape((2, 2) if fast else (4,)),
        axis if fast else (AXIS,),
        axis_types=(AxisType.Auto,) * (1 + fast),
    )
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=axis)
    size = 1e-5 if dtype == "float16" else 1.0
    params = {"w": jnp.zeros((10, 11), dtype), "b": jnp.zeros(7)}
    specs = fg.state_specs(jax.eval_shape(tx.init, params), axis)

    def step(rows, state):
        mean, state = tx.update(jax.tree.map(lambda g: g[0], rows), state)
        return mean, state

    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    run = jax.jit(wrap(step, in_specs=(P(axis), specs), out_specs=(P(), specs)))
    state = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))(params)
    applied = wanted = 0.0
    for number in range(200):
        grads = jax.tree.map(
            lambda g, p: (g * size).astype(p.dtype), gradients(params, 4, seed=number), params
        )
        mean, state = run(grads, state)
        assert mean["w"].dtype == dtype
        shards = [np.asarray(s.data).tobytes() for s in mean["w"].addressable_shards]
        assert len(set(shards)) == 1
        applied += np.asarray(mean["w"], np.float64)
        wanted += np.asarray(grads["w"], np.float64).mean(0)
    kept = np.asarray(state.memory.worker_rows.residual["w"], np.float64).mean(0)
    if not isinstance(exchange, fg.AllReduce):
        kept = kept + kept_inside(state.exchange[0], (10, 11))
    assert np.linalg.norm(kept) > 0
    distance = np.linalg.norm(applied + kept - wanted) / np.linalg.norm(wanted)
    assert distance < 1e-5
    assert int(state.skipped) == 0


def kept_inside(state, shape):
    """The residual that the exchange keeps of its own: of the last leaf, "w", behind "b"."""
    kept = state.shards.worker_rows
    if not kept:
        return 0.0
    (pieces,) = jax.tree.leaves(kept.memory)
    groups = np.asarray(pieces, np.float64).reshape(2, 2, -1)
    whole = np.mean([unshard(group, 117) for group in groups], axis=0)
    return whole[7:].reshape(shape)


@pytest.mark.parametrize("memory", [fg.ErrorFeedback(beta=0.3), fg.MomentumCorrection(0.5)])
def test_every_memory_takes_back_what_rounding_drops(memory):
    """A dense mean keeps the velocity, so what is applied is the sum of the velocities."""
    tx = fg.compressed_pmean(fg.AllReduce(), memory, axis_name=AXIS)
    params = {"w": jnp.zeros(200, jnp.bfloat16)}
    init, update = train_step(tx, 4, like=params)
    state, applied, wanted, velocity = init(params), 0.0, 0.0, 0.0
    for number in range(50):
        grads = gradients(params, 4, seed=number)
        mean, state = update(grads, state)
        applied += np.asarray(mean["w"], np.float64)
        velocity = 0.5 * velocity if isinstance(memory, fg.MomentumCorrection) else 0.0
        velocity = velocity + np.asarray(grads["w"], np.float64).mean(0)
        wanted += velocity
    kept = np.asarray(state.memory.worker_rows.residual["w"], np.float64).mean(0)
    kept = kept / getattr(memory, "beta", 1.0)
    assert np.linalg.norm(kept) > 0
    np.testing.assert_allclose(applied + kept, wanted, atol=1e-5 * np.abs(wanted).max())


def test_decay_is_the_formula():
    memory = fg.ErrorFeedback(decay=0.5)
    state = fg.memories.ErrorFeedback().init(jnp.ones(2))
    x, state = memory.add(jnp.array([1.0, 2.0]), state)
    state = memory.update(x, jnp.array([1.0, 0.0]), x, state)
    x, _ = memory.add(jnp.array([1.0, 1.0]), state)
    assert x.tolist() == [1.5, 1.0]
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5; use 1.0, which loses nothing"):
        fg.ErrorFeedback(decay=1.5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_bad_step_leaves_the_memory_and_is_counted(check_vma):
    tx = fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS)
    like = {"w": jax.ShapeDtypeStruct((90,), jnp.float32)}
    init, update = train_step(tx, 4, check_vma=check_vma, like=like)
    _, before = update(gradients(like, 4), init({"w": jnp.zeros(90)}))
    bad = {"w": gradients(like, 4)["w"].at[3, 5].set(np.nan)}
    mean, after = update(bad, before)
    assert np.all(np.isnan(mean["w"]))
    assert int(after.skipped) == 1
    assert int(after.step) == 2
    np.testing.assert_array_equal(
        before.memory.worker_rows.residual["w"], after.memory.worker_rows.residual["w"]
    )


def test_apply_if_finite_after_it_skips_on_all_workers():
    tx = optax.chain(
        fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS),
        optax.apply_if_finite(optax.adam(1e-3), max_consecutive_errors=3),
    )
    like = {"w": jax.ShapeDtypeStruct((90,), jnp.float32)}
    init, update = train_step(tx, 4, like=like)
    bad = {"w": gradients(like, 4)["w"].at[3, 5].set(np.inf)}
    updates, state = update(bad, init({"w": jnp.zeros(90)}))
    np.testing.assert_array_equal(updates["w"], np.zeros(90))
    assert int(state[1].total_notfinite) == 1


def training(exchange, memory, optimizer, steps, workers=8, check_vma=True):
    """Linear regression from different data on each worker; every worker's own parameters."""
    tx = optax.chain(fg.compressed_pmean(exchange, memory, axis_name=AXIS, key=1), optimizer)
    target = jnp.linspace(-1.0, 1.0, 40)
    params = {"w": jnp.zeros(40), "b": jnp.zeros(())}
    mesh = mesh_of(workers)
    specs = fg.state_specs(jax.eval_shape(tx.init, params), AXIS)

    def loss(p, x):
        return jnp.mean((x @ p["w"] + p["b"] - x @ target - 0.5) ** 2)

    def step(params, state, x):
        # One row of parameters for each worker, so that a difference between them would show.
        own = jax.tree.map(lambda p: p[0], params)
        grad = jax.grad(loss)(own, x[0])
        updates, state = tx.update(grad, state)
        return jax.tree.map(lambda p: p[None], optax.apply_updates(own, updates)), state

    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    state = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))(params)
    ins, outs = (P(AXIS), specs, P(AXIS)), (P(AXIS), specs)
    run = jax.jit(wrap(step, in_specs=ins, out_specs=outs))
    rows = NamedSharding(mesh, P(AXIS))
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (workers, *p.shape)), params)
    params = jax.device_put(params, rows)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = jax.device_put(rng.standard_normal((workers, 16, 40)).astype(np.float32), rows)
        params, state = run(params, state, x)
    return params, state, run, float(jnp.max(jnp.abs(params["w"][0] - target)))


@pytest.mark.parametrize("name", ["gather blocked", "gather paper", "gather stochastic", "warm-up"])
def test_replicas_are_bit_identical_after_200_steps_of_one_program(name):
    params, state, run, error = training(
        EXCHANGES[name], fg.ErrorFeedback(), optax.sgd(0.05), steps=200
    )
    for leaf in jax.tree.leaves(params):
        bits = np.asarray(leaf).view(np.uint32)
        assert np.all(bits == bits[:1])
    assert run._cache_size() == 1
    assert int(state[0].step) == 200
    assert error < 0.05


def test_without_memory_a_biased_codec_does_not_get_there():
    """The test above would pass without compressing; this one would not."""
    codec = fg.AllGather(fg.TopK(k=2))
    *_, error = training(codec, fg.NoMemory(), optax.sgd(0.05), steps=60)
    *_, dense = training(fg.AllReduce(), fg.NoMemory(), optax.sgd(0.05), steps=60)
    assert error > 3 * dense


def test_check_vma_off_trains_alike():
    on = training(BLOCKED, fg.ErrorFeedback(), optax.adam(0.01), steps=20)[0]
    off = training(BLOCKED, fg.ErrorFeedback(), optax.adam(0.01), steps=20, check_vma=False)[0]
    np.testing.assert_allclose(on["w"], off["w"], rtol=1e-3, atol=1e-4)


def test_in_partition_only_its_own_leaves_are_exchanged():
    tx = optax.partition(
        {
            "slow": fg.compressed_pmean(
                fg.AllGather(fg.TopK(k=1)), fg.ErrorFeedback(), axis_name=AXIS, allow_masked=True
            ),
            "fast": fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS, allow_masked=True),
        },
        {"w": "slow", "b": "fast"},
    )
    like = {"w": jax.ShapeDtypeStruct((20,), "float32"), "b": jax.ShapeDtypeStruct((4,), "float32")}
    init, update = train_step(tx, 4, like=like)
    grads = gradients(like, 4)
    state = init(jax.tree.map(lambda g: g[0], grads))
    compiled = update.lower(grads, state).compile()
    assert sorted(c.kind for c in fg.audit(compiled)) == ["all-gather", "all-reduce"]
    mean, _ = compiled(grads, state)
    np.testing.assert_allclose(mean["b"], grads["b"].mean(0), rtol=1e-6)
    assert np.count_nonzero(mean["w"]) <= 4


def test_in_inject_hyperparams():
    @optax.inject_hyperparams
    def make(learning_rate):
        return optax.chain(
            fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS),
            optax.sgd(learning_rate),
        )

    tx = make(learning_rate=optax.linear_schedule(1.0, 0.0, 4))
    like = {"w": jax.ShapeDtypeStruct((90,), jnp.float32)}
    init, update = train_step(tx, 4, like=like)
    state = init({"w": jnp.zeros(90)})
    norms = []
    for _ in range(4):
        updates, state = update(gradients(like, 4), state)
        norms.append(float(jnp.linalg.norm(updates["w"])))
    assert norms[3] < norms[0]
    assert update._cache_size() == 1


def test_in_multi_steps_with_accumulation():
    tx = optax.MultiSteps(
        optax.chain(fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS), optax.sgd(-1.0)), 2
    )
    like = {"w": jax.ShapeDtypeStruct((9,), jnp.float32)}
    grads = gradients(like, 4)

    def two(grad):
        state = tx.init(grad)
        _, state = tx.update(grad, state)
        return tx.update(grad, state)[0]

    mean = everywhere("shard_map unchecked", two, 4)(grads)
    np.testing.assert_allclose(mean["w"][0], grads["w"].mean(0), rtol=1e-5)


def test_state_specs_put_a_row_on_each_worker():
    tx = optax.chain(
        fg.compressed_pmean(EXCHANGES["warm-up"], fg.ErrorFeedback(), axis_name=AXIS),
        optax.adam(1e-3),
    )
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(())}
    shapes = jax.eval_shape(tx.init, params)
    specs = fg.state_specs(shapes, AXIS)
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    assert set(jax.tree.leaves(specs[0].memory)) == {P(AXIS)}
    assert set(jax.tree.leaves((specs[0].step, specs[0].exchange, specs[1]))) == {P()}
    assert set(jax.tree.leaves(fg.state_specs(shapes, ("a", "b"))[0].memory)) == {P(("a", "b"))}
    init, _ = train_step(tx, 8, like=params)
    state = init(params)
    residual = state[0].memory.worker_rows.residual["w"]
    assert residual.shape == (8, 3, 4)
    assert [s.data.shape for s in residual.addressable_shards] == [(1, 3, 4)] * 8
    assert state[1][0].mu["w"].shape == (3, 4)


def test_init_needs_only_shapes():
    tx = fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS)
    assert tx.init(TREE).memory.worker_rows.residual["layers"][0]["w"].shape == (1, 10, 11)


def test_several_buckets_are_several_collectives():
    tx = fg.compressed_pmean(
        BLOCKED, fg.ErrorFeedback(), axis_name=AXIS, bucketing=fg.Bucketing(bucket_bytes=256)
    )
    like = {
        "w": jax.ShapeDtypeStruct((10, 11), "float32"),
        "b": jax.ShapeDtypeStruct((40,), "float32"),
    }
    init, update = train_step(tx, 4, like=like)
    grads = gradients(like, 4)
    state = init(jax.tree.map(lambda g: g[0], grads))
    found = fg.audit(update.lower(grads, state).compile())
    assert [c.kind for c in found] == ["all-gather"] * 3
    assert sum(c.bytes for c in found) == fg.wire_bytes(
        BLOCKED, like, bucketing=fg.Bucketing(bucket_bytes=256)
    )
    mean, state = update(grads, state)
    for name in like:
        residual = state.memory.worker_rows.residual[name].mean(0)
        np.testing.assert_allclose(mean[name] + residual, grads[name].mean(0), atol=1e-5)


def test_the_state_can_be_donated():
    tx = optax.chain(
        fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS), optax.sgd(1.0)
    )
    params = {"w": jnp.ones((4, 90))}
    state = jax.jit(jax.vmap(tx.init))(params)
    update = jax.vmap(lambda g, s: tx.update(g, s), axis_name=AXIS)
    jax.jit(update, donate_argnums=1)(params, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("empty", [{}, {"a": None}, {"a": jnp.zeros((0, 3))}], ids=str)
def test_empty_trees_pass(empty):
    tx = fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS)
    run = jax.shard_map(
        lambda: tx.update(empty, tx.init(empty))[0],
        mesh=mesh_of(2),
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    out = jax.jit(run)()
    assert jax.tree.structure(out) == jax.tree.structure(empty)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_model_axis_is_left_alone(check_vma):
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    tx = fg.compressed_pmean(fg.AllGather(fg.TopK(k=3)), fg.ErrorFeedback(), axis_name="data")
    x = gradients({"w": jax.ShapeDtypeStruct((20,), "float32")}, 4)
    specs = fg.state_specs(jax.eval_shape(tx.init, {"w": jnp.zeros(20)}), "data")
    specs = specs._replace(memory=jax.tree.map(lambda _: P("data", "model"), specs.memory))

    def step(rows):
        own = jax.tree.map(lambda g: g[0], rows)
        return tx.update(own, tx.init(own))

    mean, state = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=P("data", "model"),
            out_specs=(P("model"), specs),
            check_vma=check_vma,
        )
    )(x)
    assert mean["w"].shape == (20,)
    assert state.memory.worker_rows.residual["w"].shape == (4, 20)
    for half in (slice(0, 10), slice(10, 20)):
        kept = np.asarray(x["w"][:, half] - state.memory.worker_rows.residual["w"][:, half])
        assert np.all(np.count_nonzero(kept, axis=1) == 3)
        np.testing.assert_allclose(mean["w"][half], kept.mean(0), rtol=1e-5, atol=1e-6)


def test_a_bad_step_is_agreed_on_over_the_model_axis():
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    tx = fg.compressed_pmean(fg.AllGather(fg.TopK(k=3)), axis_name="data")

    def step(rows):
        return tx.update(rows[0], tx.init(rows[0]))

    specs = fg.state_specs(jax.eval_shape(tx.init, jnp.zeros(20)), "data")
    bad = jnp.ones((4, 20)).at[1, 2].set(np.nan)
    mean, state = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("data", "model"), out_specs=(P("model"), specs))
    )(bad)
    assert int(state.skipped) == 1
    assert np.isnan(mean).tolist() == [True] * 10 + [False] * 10


def test_what_overflows_is_summed_over_the_model_axis():
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    exchange = fg.AllGather(fg.codecs.FixedRangeFloat(bits=8, maximum=1.0))
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)

    def step(rows):
        return tx.update(rows[0], tx.init(rows[0]))[1].overflow

    run = jax.shard_map(step, mesh=mesh, in_specs=P("data", "model"), out_specs=P())
    x = jnp.full((4, 20), 0.5).at[1, :3].set(2.0).at[2, 8:15].set(-3.0)  # 2 and 5 in the halves
    assert int(jax.jit(run)(x)) == 3 + 2 + 5


def test_a_sum_of_counts_over_the_model_axis_does_not_wrap():
    mesh = Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Auto,))
    counters = dict.fromkeys(("step", "skipped", "overflow"), jnp.int32(0))

    def step(count):
        stats = fg.exchanges.Stats(overflow=count[0])
        before = types.SimpleNamespace(**counters)
        return _pmean.counters(before, stats, jnp.array(True))["overflow"]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("model"), out_specs=P()))
    assert int(run(jnp.full(8, 2**31 - 1, jnp.int32))) > 2**31 - 9
    assert int(run(jnp.arange(8, dtype=jnp.int32))) == 28


def test_already_summed_gradients_are_refused():
    tx = fg.compressed_pmean(BLOCKED, axis_name=AXIS)
    params = {"w": jnp.ones(20)}

    def step(params, x, local):
        params = jax.lax.pcast(params, AXIS, to="varying") if local else params
        grad = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
        return tx.update(grad, tx.init(grad))[0]

    def run(local):
        mapped = jax.shard_map(
            lambda p, x: step(p, x[0], local),
            mesh=mesh_of(4),
            in_specs=(P(), P(AXIS)),
            out_specs=P(),
        )
        return jax.jit(mapped)(params, jnp.ones((4, 20)))

    with pytest.raises(ValueError, match=r"fg\.value_and_grad\(loss, 'data'\)"):
        run(local=False)
    assert np.all(np.isfinite(run(local=True)["w"]))


@pytest.mark.parametrize("axis", [AXIS, "model"])
def test_gradients_that_jax_has_yet_to_sum_are_refused(axis):
    """What comes of parameters that are typed as reduced, or of a cast."""
    tx = fg.compressed_pmean(BLOCKED, axis_name=AXIS)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))

    def run(function, over=AXIS):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(), P(over)), out_specs=P())
        jax.eval_shape(mapped, jnp.ones(12), jnp.ones(8 * 12))

    def of_reduced(w, x):
        reduced = jax.lax.pcast(w, axis, to="reduced")
        return one_update(tx)(jax.grad(lambda w: jnp.sum(jnp.sin(x[:12]) * w))(reduced))

    def cast(w, x):
        return one_update(tx)(jax.lax.pcast(x[:12] * w, axis, to="unreduced"))

    def reduced(w, _):
        return one_update(tx)(jax.lax.pcast(w, axis, to="reduced"))

    def summed(w, x):
        grad = jax.lax.pcast(x[:12] * w, "model", to="unreduced")
        return one_update(tx)(jax.lax.psum(grad, "model"))

    def by_value_and_grad(w, x):
        reduced = jax.lax.pcast(w, AXIS, to="reduced")
        loss = fg.value_and_grad(lambda w: jnp.sum(jnp.sin(x[:12]) * w), AXIS)
        return one_update(tx)(loss(reduced)[1])

    remedy = rf"sum over workers of type .*{axis}.*fg\.value_and_grad"
    for wrong in (of_reduced, cast, reduced):
        with pytest.raises(ValueError, match=remedy):
            run(wrong, axis)
    run(summed, (AXIS, "model"))
    run(by_value_and_grad)


def test_an_unused_parameter_still_counts_as_local():
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)

    def step(params, x):
        grad = jax.grad(lambda p: jnp.sum(p["w"] * x))(jax.lax.pcast(params, AXIS, to="varying"))
        return tx.update(grad, tx.init(grad))[0]

    run = jax.shard_map(step, mesh=mesh_of(2), in_specs=(P(), P(AXIS)), out_specs=P())
    out = jax.jit(run)({"w": jnp.ones(3), "unused": jnp.ones(2)}, jnp.arange(6.0))
    assert out["unused"].tolist() == [0.0, 0.0]
    assert out["w"].tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (
            lambda tx: tx.update({"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)})),
            ValueError,
            "inside jax.shard_map",
        ),
        (lambda tx: tx.init({"w": jnp.arange(3)}), TypeError, r"updates\['w'\].*differentiated"),
        (lambda tx: tx.init({"w": jnp.ones(3, complex)}), TypeError, "differentiated"),
        (lambda tx: tx.init({"w": 1.0}), TypeError, "got float"),
    ],
)
def test_bad_input_is_answered_with_the_remedy(call, error, remedy):
    tx = fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS)
    with pytest.raises(error, match=remedy):
        call(tx)


def test_a_state_that_is_not_sharded_is_refused():
    tx = fg.compressed_pmean(BLOCKED, fg.ErrorFeedback(), axis_name=AXIS)
    state = tx.init({"w": jnp.ones(3)})
    state = state._replace(memory=jax.tree.map(lambda a: jnp.repeat(a, 4, 0), state.memory))
    with pytest.raises(ValueError, match=r"fg\.state_specs"):
        jax.vmap(lambda g: tx.update({"w": g}, state)[0], axis_name=AXIS)(jnp.ones((4, 3)))


def test_the_key_decides_the_dither_and_the_step_changes_it():
    def means(key):
        tx = fg.compressed_pmean(EXCHANGES["gather stochastic"], axis_name=AXIS, key=key)

        def two(grad):
            first, state = tx.update(grad, tx.init(grad))
            return first, tx.update(grad, state)[0]

        return everywhere("vmap", two, 4)(gradients(jax.ShapeDtypeStruct((90,), "float32"), 4))

    (a1, a2), (b1, _), (c1, _) = means(0), means(jax.random.key(0)), means(jax.random.PRNGKey(9))
    np.testing.assert_array_equal(a1, b1)
    assert not np.array_equal(a1, a2)
    assert not np.array_equal(a1, c1)


def test_workers_round_independently():
    exchange = fg.AllGather(fg.RangeFloat(bits=4, rounding="stochastic"))
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    same = jnp.broadcast_to(gradients(jax.ShapeDtypeStruct((90,), "float32"), 1), (4, 90))
    residual = everywhere(
        "vmap", lambda g: tx.update(g, tx.init(g))[1].memory.worker_rows.residual, 4
    )(same)
    assert len({row.tobytes() for row in np.asarray(residual)}) == 4


def test_buckets_that_are_alike_are_traced_once():
    """Also with a memory of the exchange's own, whose parts are of other pieces."""
    seen = []

    class Seen(fg.AllReduce):
        def mean(self, x, state, comm):
            seen.append(x)
            return super().mean(x, state, comm)

    x = {"w": jnp.arange(1024.0).reshape(8, 128)}
    tx = fg.compressed_pmean(Seen(), axis_name=AXIS, bucketing=fg.Bucketing(bucket_bytes=512))
    out = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name=AXIS)({"w": x["w"][None]})
    np.testing.assert_array_equal(out["w"][0], x["w"])
    assert len(seen) == 1


def test_levels_have_a_memory_in_each_bucket():
    exchange = fg.Hierarchical("fast", 2, fg.AllGather(fg.TopK(fraction=0.5)))
    tx = fg.compressed_pmean(
        exchange, axis_name=("slow", "fast"), bucketing=fg.Bucketing(bucket_bytes=512)
    )
    x = jnp.arange(4.0 * 1024).reshape(2, 2, 8, 128)

    def two_steps(x):
        _, state = tx.update(x, tx.init(x))
        return tx.update(x, state)[0]

    out = jax.vmap(jax.vmap(two_steps, axis_name="fast"), axis_name="slow")(x)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[0, 0], out[1, 1])


DIFFERENTIABLE = {fg.AllReduce, fg.LeaderTopK, fg.PowerSgd, fg.AcpSgd, EXCHANGES["summed codes"]}


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_a_derivative_is_right_or_refused_with_the_remedy(name):
    """Bits have none: a gradient through a buffer was zero."""
    exchange = of_size(EXCHANGES[name], 4)
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    x = gradients(jnp.zeros((10, 15)), 4)

    def mean(row):
        return tx.update(row, tx.init(row))[0]

    derivative = jax.jit(lambda x: jax.jvp(jax.vmap(mean, axis_name=AXIS), (x,), (x,)))
    if not DIFFERENTIABLE & {type(exchange), exchange}:
        with pytest.raises(NotImplementedError, match=r"AllReduce\(\)"):
            derivative(x)
        return
    y, slope = derivative(x)  # along x itself, of which the mean is a multiple
    np.testing.assert_allclose(slope, y, atol=0.01 * np.linalg.norm(y))
    assert np.any(y)


@pytest.mark.parametrize("exchange", [fg.AllReduce(), fg.AllReduce(fg.Hadamard(block=8))], ids=repr)
def test_a_linear_sum_has_the_gradient_of_a_mean(exchange):
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(dtype="bfloat16"), axis_name=AXIS)

    def loss(x):
        return jnp.sum(tx.update(x, tx.init(x))[0] * jnp.arange(16.0))

    rows = everywhere("shard_map", jax.grad(loss), 4)(values((4, 16)))
    np.testing.assert_allclose(rows, np.tile(np.arange(16.0) / 4, (4, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exchange", [fg.AllGather(fg.Identity()), fg.TwoStage(fg.Identity(), 4)])
def test_a_gradient_through_buffers_is_refused_in_every_mode(exchange, mode):
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)

    def loss(x):
        return jnp.sum(tx.update(x, tx.init(x))[0] ** 2)

    for derivative in (jax.grad(loss), lambda x: jax.linearize(loss, x)[0] + loss(x)):
        with pytest.raises(NotImplementedError, match=r"AllReduce\(\)"):
            everywhere(mode, derivative, 4)(jnp.ones((4, 8)))


def test_what_does_not_depend_on_the_gradient_has_a_gradient():
    """A learning rate after the exchange, in a scan that carries the state, and parameters."""
    tx = fg.compressed_pmean(fg.AllGather(fg.LogQuantizer(4)), fg.ErrorFeedback(), axis_name=AXIS)

    def loss(rate, x):
        def step(carry, x):
            w, state = carry
            mean, state = tx.update(x, state)
            return (w - rate * mean, state), ()

        (w, state), _ = jax.lax.scan(step, (jnp.zeros(8), tx.init(x)), jnp.stack([x, x]))
        return jnp.sum(w) + 0 * state.step

    f = jax.jit(jax.vmap(jax.grad(loss), (None, 0), axis_name=AXIS))
    assert np.all(np.asarray(f(0.1, jnp.ones((4, 8)))) < -15)


GOSSIP = fg.contrib.gossip.choco_sgd(
    optax.sgd(0.1), fg.TopK(k=4), fg.contrib.gossip.ring(4), gamma=0.4, axis_name=("a", "b")
)


@pytest.mark.parametrize(
    "tx",
    [
        fg.compressed_pmean(fg.Hierarchical("b", 2, fg.AllReduce()), axis_name=("a", "b")),
        fg.optimizers.sharded(optax.sgd(0.1), 4, axis_name=("a", "b")),
        GOSSIP,
    ],
    ids=["hierarchical", "sharded", "gossip"],
)
def test_a_gradient_through_other_buffers_is_refused(tx):
    def loss(x):
        w = 0 * x
        _, state = tx.update(x, tx.init(w), w)
        return jnp.sum(tx.update(x, state, w + x)[0])

    run = jax.vmap(jax.vmap(jax.grad(loss), axis_name="b"), axis_name="a")
    with pytest.raises(NotImplementedError, match=r"AllReduce\(\)"):
        run(jnp.ones((2, 2, 8)))
