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
from parallel import (
    AXES,
    AXIS,
    MODES,
    everywhere,
    flat,
    grid,
    mesh_of,
    of_size,
    two_axes,
    unshard,
    with_model,
    zeros,
)
from updates import PAIR, sharded

import fftgrad as fg
from fftgrad.training import _pmean

SPARSE = fg.AllGather(CODECS["top-k 6 bits"])
ROW = jax.ShapeDtypeStruct((90,), "float32")


def one_update(tx):
    return lambda grad: tx.update(grad, tx.init(grad))[0]


@pytest.mark.parametrize(
    ("mode", "workers"), [*((mode, 4) for mode in MODES), ("shard_map", 1), ("vmap", 8)]
)
def test_dense_is_pmean_on_any_tree(mode, workers):
    tx = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
    grads = gradients(TREE, workers)
    mean = everywhere(mode, one_update(tx), workers)(grads)
    for got, given in zip(jax.tree.leaves(mean), jax.tree.leaves(grads), strict=True):
        assert (got.shape, got.dtype) == (given.shape, given.dtype)
        expected = np.asarray(given, np.float64).mean(0)
        tolerance = 1e-6 if got.dtype == jnp.float32 else 2.0**-8
        rows = np.asarray(got).astype(np.float64)
        np.testing.assert_allclose(rows[0], expected, rtol=tolerance, atol=1e-6)


ONE_OF_EACH = [*{type(e): name for name, e in EXCHANGES.items()}.values(), "gather stochastic"]


@pytest.mark.parametrize("name", sample(ONE_OF_EACH))
def test_checked_or_not_the_steps_agree_and_lose_nothing(name):
    """Sum of what was applied + mean residual = sum of the mean gradients; a bad step is undone.

    The second loss of two stages is in the residuals of the shards' owners.
    """
    ends = []
    for check_vma in (True, False):
        init, update = sharded(EXCHANGES[name], check_vma=check_vma, like=TREE, key=7)
        state, applied, wanted = init(zeros(TREE)), 0.0, 0.0
        for step in range(4):
            grads = gradients(TREE, 4, seed=step)
            mean, state = update(grads, state)
            applied, wanted = applied + flat(mean), wanted + flat(grads, 1).mean(0)
        ends.append((mean, state.memory.worker_rows))
        residual = flat(state.memory.worker_rows.residual, 1).mean(0)
        np.testing.assert_allclose(applied + residual, wanted, atol=1e-4)
        grads["scalar"] = np.float32([1, 1, np.nan, 1])
        mean, after = update(grads, state)
        assert not np.all(np.isfinite(flat(mean)))
        assert (int(after.skipped), int(after.step)) == (1, 5)
        jax.tree.map(np.testing.assert_array_equal, state.memory, after.memory)
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    if name == "gather stochastic":
        assert np.linalg.norm(residual) > 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_varies_over_the_axis_alone(name):
    """As typing by axes checks it, without a run."""
    init, update = sharded(SPARSE, memory=MEMORIES[name], like={"w": ROW})
    grads = {"w": jax.ShapeDtypeStruct((4, 90), "float32")}
    jax.eval_shape(update, grads, jax.eval_shape(init, {"w": ROW}))


@dataclasses.dataclass(frozen=True)
class Heir(fg.AllGather):
    """An exchange of one's own that inherits all but its mean: of twice the gradient, halved."""

    def mean(self, x, state, comm):
        out = super().mean(jax.tree.map(lambda a: 2 * a, x), state, comm)
        mean, error = (jax.tree.map(lambda a: a / 2, tree) for tree in (out.mean, out.error))
        return out._replace(mean=mean, error=error)


class Record(fg.NoMemory):
    """A memory of all that was sent."""

    def init(self, like):
        return jax.tree.map(jnp.zeros_like, like)

    def update(self, x, error, mean, state):
        return jax.tree.map(lambda total, x, error: total + (x - error), state, x, error)


@pytest.mark.parametrize("memory", [fg.ErrorFeedback(), Record()], ids=["feedback", "record"])
def test_parts_of_ones_own_lose_nothing(memory):
    tx = fg.compressed_pmean(Heir(fg.TopK(fraction=0.2)), memory, axis_name=AXIS)
    rows = [gradients(jax.ShapeDtypeStruct((50,), "float32"), 4, seed=seed) for seed in range(3)]
    rows = np.stack(rows, axis=1)

    def run(grads):
        state = tx.init(grads[0])
        state, means = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)
        return means.sum(0), state.memory.worker_rows

    means, held = jax.device_get(jax.jit(jax.vmap(run, axis_name=AXIS))(rows))
    held = np.asarray(jax.tree.leaves(held)[0]).reshape(4, -1).mean(0)
    wanted = held if isinstance(memory, Record) else rows.sum(1).mean(0) - held
    np.testing.assert_allclose(means[0], wanted, atol=1e-6)


def test_several_buckets_are_several_collectives():
    """Also where a leaf is cut; none of them loses anything."""
    options = {"bucketing": fg.Bucketing(bucket_bytes=160)}
    init, update = sharded(SPARSE, **options)
    start, grads = init(zeros(PAIR)), gradients(PAIR, 4)
    compiled = update.lower(grads, start).compile()
    found = fg.audit(compiled)
    assert [c.kind for c in found] == ["all-gather"] * 4
    assert sum(c.bytes for c in found) == fg.wire_bytes(SPARSE, PAIR, **options)
    mean, state = compiled(grads, start)
    residual = flat(state.memory.worker_rows.residual, 1).mean(0)
    np.testing.assert_allclose(flat(mean) + residual, flat(grads, 1).mean(0), atol=1e-5)


NARROW = {
    "dense": fg.AllReduce(),
    "gather": fg.AllGather(fg.TopK(fraction=0.3)),
    "low rank": fg.PowerSgd(rank=2),
    "low rank in turns": fg.exchanges.AcpSgd(rank=2),
    "two stages": fg.TwoStage(fg.TopK(fraction=0.3), workers=4),
    "hierarchical": fg.Hierarchical("fast", 2, fg.AllGather(fg.TopK(fraction=0.3))),
}


@pytest.mark.parametrize(
    ("name", "dtype"), sample(itertools.product(NARROW, ["bfloat16", "float16"]), frozenset)
)
def test_what_rounding_drops_of_the_mean_is_not_lost(name, dtype):
    """As above, over 60 steps whose means have 8 or 11 bits; float16 gradients are subnormal."""
    exchange = NARROW[name]
    fast = isinstance(exchange, fg.Hierarchical)
    axis, mesh = (AXES, grid(2, 2)) if fast else (AXIS, mesh_of(4))
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=axis)
    size = 1e-5 if dtype == "float16" else 1.0
    params = {"w": np.zeros((10, 11), dtype), "b": np.zeros(7, np.float32)}
    specs = fg.state_specs(jax.eval_shape(tx.init, params), axis)

    def step(rows, state):
        mean, state = tx.update(jax.tree.map(lambda g: g[0], rows), state)
        return mean, state

    wrap = functools.partial(jax.shard_map, mesh=mesh)
    run = jax.jit(wrap(step, in_specs=(P(axis), specs), out_specs=(P(), specs)))
    state = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))(params)
    applied = wanted = 0.0
    for number in range(60):
        grads = {
            name: (size * values((4, *leaf.shape), seed=number)).astype(leaf.dtype)
            for name, leaf in params.items()
        }
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
    kept = state.own.worker_rows
    if not hasattr(kept, "cut_rows"):
        return 0.0
    (pieces,) = jax.tree.leaves(kept.cut_rows)
    groups = np.asarray(pieces, np.float64).reshape(2, 2, -1)
    whole = np.mean([unshard(group, 117) for group in groups], axis=0)
    return whole[7:].reshape(shape)


def of_gradients(name):
    return fg.compressed_pmean(EXCHANGES[name], fg.ErrorFeedback(), axis_name=AXIS, key=1)


TRAINED = {
    "gather stochastic": optax.chain(of_gradients("gather stochastic"), optax.sgd(0.05)),
    "warm-up": optax.chain(of_gradients("warm-up"), optax.sgd(0.05)),
    "on the local update": optax.chain(
        fg.training.local_state(optax.scale_by_adam(b1=0.0, b2=0.99)),
        of_gradients("gather paper"),
        optax.scale(-0.02),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_replicas_are_bit_identical_after_200_steps_of_one_program(name):
    """Linear regression from different data on each worker, with rows of parameters."""
    tx, target = TRAINED[name], np.linspace(-1.0, 1.0, 40, dtype=np.float32)
    zeros, mesh = {"w": np.zeros(40, np.float32), "b": np.zeros((), np.float32)}, mesh_of(4)
    specs = fg.state_specs(jax.eval_shape(tx.init, zeros), AXIS)

    def loss(p, x):
        return jnp.mean((x @ p["w"] + p["b"] - x @ target - 0.5) ** 2)

    def step(params, state, x):
        own = jax.tree.map(lambda p: p[0], params)
        updates, state = tx.update(jax.grad(loss)(own, x[0]), state)
        return jax.tree.map(lambda p: p[None], optax.apply_updates(own, updates)), state

    wrap = functools.partial(jax.shard_map, mesh=mesh)
    state = jax.jit(wrap(tx.init, in_specs=P(), out_specs=specs))(zeros)
    ins, outs = (P(AXIS), specs, P(AXIS)), (P(AXIS), specs)
    run = jax.jit(wrap(step, in_specs=ins, out_specs=outs))
    rows, rng = NamedSharding(mesh, P(AXIS)), np.random.default_rng(0)
    params = jax.device_put(jax.tree.map(lambda p: np.stack([p] * 4), zeros), rows)
    for _ in range(200):
        x = jax.device_put(rng.standard_normal((4, 16, 40)).astype(np.float32), rows)
        params, state = run(params, state, x)
    for leaf in jax.tree.leaves(params):
        assert len({row.tobytes() for row in np.asarray(leaf)}) == 1
    assert run._cache_size() == 1
    for leaf, spec in zip(*map(jax.tree.leaves, (state, specs)), strict=True):
        if spec == P():  # replicated, as typing by axes has proved
            assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
    assert np.abs(np.asarray(params["w"])[0] - target).max() < 0.1


def test_in_partition_only_its_own_leaves_are_exchanged():
    exchanges = {"a": fg.AllGather(fg.TopK(k=1)), "b": fg.AllReduce()}
    own = {
        name: fg.compressed_pmean(exchange, axis_name=AXIS, allow_masked=True)
        for name, exchange in exchanges.items()
    }
    tx, grads = optax.partition(own, {"a": "a", "b": "b"}), gradients(PAIR, 4)
    mean = jax.device_get(everywhere("vmap", one_update(tx), 4)(grads))
    np.testing.assert_allclose(mean["b"][0], grads["b"].mean(0), rtol=1e-5, atol=1e-6)
    assert np.count_nonzero(mean["a"][0]) <= 4


def test_empty_trees_pass():
    tx = fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name=AXIS)
    trees = [{}, {"a": None}, {"a": np.zeros((0, 3), np.float32)}]
    run = jax.vmap(lambda _: [one_update(tx)(tree) for tree in trees], axis_name=AXIS)
    assert jax.tree.structure(jax.jit(run)(np.ones(2))) == jax.tree.structure(trees)


def test_what_overflows_is_summed_over_the_model_axis():
    exchange = fg.AllGather(fg.codecs.FixedRangeFloat(bits=8, maximum=1.0))
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)

    def step(rows):
        return tx.update(rows[0], tx.init(rows[0]))[1].overflow

    run = jax.shard_map(step, mesh=with_model(), in_specs=P("data", "model"), out_specs=P())
    x = np.full((4, 20), 0.5, np.float32)
    x[1, :3], x[2, 8:15] = 2.0, -3.0  # 2 and 5 in the halves
    assert int(jax.jit(run)(x)) == 3 + 2 + 5


def test_a_sum_of_counts_over_the_model_axis_does_not_wrap():
    mesh = Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Auto,))
    counters = dict.fromkeys(("step", "skipped", "overflow"), np.int32(0))

    def step(count):
        stats = fg.exchanges.Stats(overflow=count[0])
        before = types.SimpleNamespace(**counters)
        return _pmean.counters(before, stats, jnp.array(True))[2]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("model"), out_specs=P()))
    assert int(run(np.full(8, 2**31 - 1, np.int32))) == (2**31 - 1) // 8 * 8
    assert int(run(np.arange(8, dtype=np.int32))) == 28


def test_already_summed_gradients_are_refused():
    tx = fg.compressed_pmean(SPARSE, axis_name=AXIS)

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
        jax.eval_shape(mapped, {"w": np.ones(20)}, np.ones((4, 20)))

    with pytest.raises(ValueError, match=r"fg\.value_and_grad\(loss, 'data'\)"):
        run(local=False)
    run(local=True)


@pytest.mark.parametrize("axis", [AXIS, "model"])
def test_gradients_that_jax_has_yet_to_sum_are_refused(axis):
    """What comes of parameters that are typed as reduced, or of a cast."""
    tx = fg.compressed_pmean(SPARSE, axis_name=AXIS)

    def run(function, over=AXIS):
        mapped = jax.shard_map(function, mesh=with_model(), in_specs=(P(), P(over)), out_specs=P())
        jax.eval_shape(mapped, np.ones(12), np.ones(8 * 12))

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
    ones = {"w": np.ones(3, np.float32), "unused": np.ones(2, np.float32)}
    out = jax.jit(run)(ones, np.arange(6, dtype=np.float32))
    assert out["unused"].tolist() == [0.0, 0.0]
    assert out["w"].tolist() == [1.5, 2.5, 3.5]


def test_a_state_that_is_not_sharded_is_refused():
    tx = fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name=AXIS)
    state = jax.eval_shape(tx.init, {"w": np.ones(3)})
    rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape[1:]), a.dtype), state.memory)
    run = jax.vmap(lambda g, s: tx.update({"w": g}, s)[0], (0, None), axis_name=AXIS)
    with pytest.raises(ValueError, match=r"fg\.state_specs"):
        jax.eval_shape(run, np.ones((4, 3)), state._replace(memory=rows))


def test_the_key_decides_the_dither_which_differs_by_step_and_worker():
    exchange = fg.AllGather(fg.RangeFloat(bits=4, rounding="stochastic"))
    same = np.broadcast_to(gradients(ROW, 1), (4, 90))

    def means(key):
        tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, key=key)
        init, update = (
            everywhere("vmap", function, 4) for function in (tx.init, lambda g, s: tx.update(g, s))
        )
        first, state = update(same, init(same))
        assert len({row.tobytes() for row in np.asarray(state.memory.worker_rows.residual)}) == 4
        no_memory = state._replace(memory=init(same).memory)
        return np.asarray(first), np.asarray(update(same, no_memory)[0])

    (a1, a2), (b1, _), (c1, _) = means(0), means(jax.random.key(0)), means(jax.random.PRNGKey(9))
    np.testing.assert_array_equal(a1, b1)
    assert not np.array_equal(a1, a2)
    assert not np.array_equal(a1, c1)


def test_buckets_that_are_alike_are_traced_once():
    """Also with a memory of the exchange's own, whose parts are of other pieces."""
    seen = []

    class Seen(fg.AllReduce):
        def mean(self, x, state, comm):
            seen.append(x)
            return super().mean(x, state, comm)

    tx = fg.compressed_pmean(Seen(), axis_name=AXIS, bucketing=fg.Bucketing(bucket_bytes=512))
    x = {"w": np.arange(1024, dtype=np.float32).reshape(1, 8, 128)}
    out = everywhere("vmap", one_update(tx), 1)(x)
    np.testing.assert_array_equal(out["w"], x["w"])
    assert len(seen) == 1


def test_levels_have_a_memory_in_each_bucket():
    exchange = fg.Hierarchical("fast", 2, fg.AllGather(fg.TopK(fraction=0.5)))
    tx = fg.compressed_pmean(exchange, axis_name=AXES, bucketing=fg.Bucketing(bucket_bytes=512))
    x = np.arange(4 * 256, dtype=np.float32).reshape(2, 2, 2, 128)

    def two_steps(x):
        return jax.lax.scan(lambda s, _: tx.update(x, s)[::-1], tx.init(x), None, 2)[1][-1]

    out = jax.device_get(two_axes(two_steps)(x))
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[0, 0], out[1, 1])


DIFFERENTIABLE = {
    fg.AllReduce,
    fg.exchanges.LeaderTopK,
    fg.PowerSgd,
    fg.exchanges.AcpSgd,
    EXCHANGES["summed codes"],
}


@pytest.mark.parametrize("name", sample(EXCHANGES))
def test_a_derivative_is_right_or_refused_with_the_remedy(name):
    """Bits have none: a gradient through a buffer was zero."""
    exchange = of_size(EXCHANGES[name], 4)
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    x = gradients(jax.ShapeDtypeStruct((10, 15), "float32"), 4)
    mean = jax.vmap(one_update(tx), axis_name=AXIS)
    derivative = jax.jit(lambda x: jax.jvp(mean, (x,), (x,)))
    if not DIFFERENTIABLE & {type(exchange), exchange}:
        with pytest.raises(NotImplementedError, match=r"AllReduce\(\)"):
            derivative(x)
        return
    y, slope = derivative(x)  # along x itself, of which the mean is a multiple
    np.testing.assert_allclose(slope, y, atol=0.01 * np.linalg.norm(np.asarray(y)))
    assert np.any(np.asarray(y))


@pytest.mark.parametrize("exchange", [fg.AllReduce(), fg.AllReduce(fg.Hadamard(block=8))], ids=repr)
def test_a_linear_sum_has_the_gradient_of_a_mean(exchange):
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(dtype="bfloat16"), axis_name=AXIS)

    def loss(x):
        return jnp.sum(tx.update(x, tx.init(x))[0] * jnp.arange(16.0))

    rows = everywhere("shard_map", jax.grad(loss), 4)(values((4, 16)))
    np.testing.assert_allclose(rows, np.tile(np.arange(16.0) / 4, (4, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "exchange", [fg.AllGather(fg.codecs.Identity()), fg.TwoStage(fg.codecs.Identity(), 4)]
)
def test_a_gradient_through_buffers_is_refused_in_every_mode(exchange):
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)

    def loss(x):
        return jnp.sum(one_update(tx)(x) ** 2)

    for mode in MODES:
        for derivative in (jax.grad(loss), lambda x: jax.linearize(loss, x)[0] + loss(x)):
            with pytest.raises(NotImplementedError, match=r"AllReduce\(\)"):
                jax.eval_shape(everywhere(mode, derivative, 4), np.ones((4, 8), np.float32))


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
    assert np.all(np.asarray(f(0.1, np.ones((4, 8), np.float32))) < -15)


def test_a_gradient_through_other_buffers_is_refused():
    axes = ("a", "b")
    ring = fg.contrib.gossip.ring(4)
    for tx in (
        fg.compressed_pmean(fg.Hierarchical("b", 2, fg.AllReduce()), axis_name=axes),
        fg.optimizers.sharded(optax.sgd(0.1), 4, axis_name=axes),
        fg.contrib.gossip.choco_sgd(optax.sgd(0.1), fg.TopK(k=4), ring, gamma=0.4, axis_name=axes),
    ):

        def loss(x, tx=tx):
            w = 0 * x
            _, state = tx.update(x, tx.init(w), w)
            return jnp.sum(tx.update(x, state, w + x)[0])

        run = jax.vmap(jax.vmap(jax.grad(loss), axis_name="b"), axis_name="a")
        with pytest.raises(NotImplementedError, match=r"AllReduce\(\)"):
            jax.eval_shape(run, np.ones((2, 2, 8), np.float32))
