"""compressed_pmean as an optax transformation: chains, states, errors, and training."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CODECS, EXCHANGES, MEMORIES, TREE, gradients, sample, values
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from parallel import (
    AXIS,
    MODES,
    everywhere,
    flat,
    mesh_of,
    of_size,
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


ONE_OF_EACH = [*{type(e): name for name, e in EXCHANGES.items()}.values(), "gather rotations"]


@pytest.mark.parametrize("name", sample(ONE_OF_EACH))
def test_checked_or_not_the_steps_agree_and_lose_nothing(name):
    """Sum of what was applied + mean residual = sum of the mean gradients.

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
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    if name == "gather rotations":
        assert np.linalg.norm(residual) > 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_varies_over_the_axis_alone(name):
    """As typing by axes checks it, without a run."""
    init, update = sharded(SPARSE, memory=MEMORIES[name], like={"w": ROW})
    grads = {"w": jax.ShapeDtypeStruct((4, 90), "float32")}
    jax.eval_shape(update, grads, jax.eval_shape(init, {"w": ROW}))


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


def test_empty_trees_pass():
    tx = fg.compressed_pmean(SPARSE, fg.ErrorFeedback(), axis_name=AXIS)
    trees = [{}, {"a": None}, {"a": np.zeros((0, 3), np.float32)}]
    run = jax.vmap(lambda _: [one_update(tx)(tree) for tree in trees], axis_name=AXIS)
    assert jax.tree.structure(jax.jit(run)(np.ones(2))) == jax.tree.structure(trees)


def test_what_overflows_is_summed_over_the_model_axis():
    exchange = fg.AllGather(fg.RangeFloat(8, limits=(-1.0, 1.0)))
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
    exchange = fg.AllGather(fg.UniformQuantizer(bits=4))
    same = np.broadcast_to(gradients(ROW, 1), (4, 90))

    def steps(grad):
        found = []
        for key in (0, jax.random.key(0), jax.random.PRNGKey(9)):
            tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, key=key)
            start = tx.init(grad)
            first, state = tx.update(grad, start)
            second, _ = tx.update(grad, state._replace(memory=start.memory))
            found.append((first, second, state.memory.worker_rows.residual))
        return found

    (a1, a2, kept), (b1, *_), (c1, *_) = jax.device_get(everywhere("vmap", steps, 4)(same))
    assert len({row.tobytes() for row in kept}) == 4
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
