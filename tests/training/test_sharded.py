"""Parameters and optimizer states sharded over the axis of the workers: both ways compressed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from cases import SLOW, gradients, values
from jax.sharding import PartitionSpec as P
from parallel import AXIS, MODES, everywhere, mesh_of

import fftgrad as fg
from fftgrad.exchanges import _shards

WORKERS = 4
LEVELS = fg.UniformQuantizer(bits=8, bucket=16, norm="max")
SIGN, TOP = fg.Sign(), fg.TopK(fraction=0.25)


def rows_of(x, axis, workers):
    """The shards of an array along an axis, in their order."""
    return np.split(np.asarray(x, np.float64), workers, axis=axis)


def decoded(codec, x, workers=WORKERS):
    """What a codec makes of an array of any shape, for one of so many shards."""
    return np.asarray(round_trip(codec.shard(workers), np.ravel(x))).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, flat):
    return fg.decompress(codec, fg.compress(codec, flat), flat)


# The two collectives


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_without_loss_they_are_those_of_jax(mode, axis):
    x = jnp.asarray(values((WORKERS, 8, 12, 4)))

    def both(x):
        ours = fg.optimizers.compressed_psum_scatter(x, AXIS, fg.Identity(), scatter_dimension=axis)
        theirs = jax.lax.psum_scatter(x, AXIS, scatter_dimension=axis % 3, tiled=True)
        whole = fg.optimizers.compressed_all_gather(
            ours.shard, AXIS, fg.Identity(), gather_dimension=axis
        )
        other = jax.lax.all_gather(theirs, AXIS, axis=axis % 3, tiled=True)
        return ours.shard, theirs, fg_vary(whole), other, ours.sent, x

    ours, theirs, whole, other, sent, own = everywhere(mode, both, WORKERS)(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(whole, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(sent, own)


def fg_vary(x):
    """Typed as each worker's own, for the results of `everywhere`."""
    return x + 0 * jax.lax.axis_index(AXIS).astype(x.dtype)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("codec", [SIGN, TOP], ids=["sign", "top-k"])
def test_a_shard_is_the_sum_of_what_its_owner_got(codec, axis):
    x = jnp.asarray(values((WORKERS, 8, 12)))
    scatter = functools.partial(
        fg.optimizers.compressed_psum_scatter, axis_name=AXIS, codec=codec, scatter_dimension=axis
    )
    got = everywhere("vmap", scatter, WORKERS)(x)
    for owner in range(WORKERS):
        parts = [rows_of(row, axis, WORKERS)[owner].astype(np.float32) for row in x]
        # A shard is compressed as it lies with the cut axis in front.
        sent = [np.moveaxis(decoded(codec, np.moveaxis(p, axis, 0)), 0, axis) for p in parts]
        np.testing.assert_array_equal(got.shard[owner], functools.reduce(np.add, sent))
        for worker in range(WORKERS):
            told = rows_of(got.sent[worker], axis, WORKERS)[owner]
            np.testing.assert_array_equal(told, sent[worker])


def test_a_gathered_shard_is_a_whole_vector_to_its_codec():
    """All k coefficients of each shard, at the bytes of that codec and that vector."""
    codec, shards = fg.TopK(k=8), jnp.asarray(values((WORKERS, 24)))
    gather = functools.partial(fg.optimizers.compressed_all_gather, axis_name=AXIS, codec=codec)
    whole = everywhere("vmap", gather, WORKERS)(shards)[0]
    np.testing.assert_array_equal(whole, np.ravel([decoded(codec, x, 1) for x in shards]))
    assert np.count_nonzero(whole) == WORKERS * 8

    run = jax.shard_map(
        lambda x: gather(x[0]), mesh=mesh_of(WORKERS), in_specs=P(AXIS), out_specs=P()
    )
    (sent,) = fg.audit(jax.jit(run).lower(shards).compile())
    assert sent.bytes == fg.wire_bytes(codec, shards[0])


def test_feedback_sends_all_in_the_end():
    x = jnp.asarray(values((WORKERS, 16, 6)))

    def steps(x):
        def one(residual, _):
            out = fg.optimizers.compressed_psum_scatter(x + residual, AXIS, TOP)
            return x + residual - out.sent, out.shard

        residual, shards = jax.lax.scan(one, jnp.zeros_like(x), None, length=200)
        return residual, jnp.mean(shards, axis=0)

    residual, shard = everywhere("vmap", steps, WORKERS)(x)
    exact = np.asarray(x, np.float64).sum(0).reshape(WORKERS, 4, 6)
    lost = rows_of(np.asarray(residual, np.float64).sum(0) / 200, 0, WORKERS)
    np.testing.assert_allclose(np.asarray(shard) + lost, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(shard, exact, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize(
    "codec", [TOP, fg.UniformQuantizer(4, 16, norm="max")], ids=["top-k", "levels"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_differences_do_not_add_up(dtype, codec):
    """After 200 gathers as near as after 20."""
    shards = jnp.asarray(values((WORKERS, 24, 4))).astype(dtype)
    drift = 0.01 * jnp.asarray(values((WORKERS, 24, 4), seed=1))

    def steps(shard, drift):
        def one(carry, i):
            shard, whole = carry
            shard = shard + drift * jnp.cos(0.1 * i)
            whole = fg.optimizers.compressed_all_gather(
                shard.astype(jnp.float32), AXIS, codec, reference=whole
            )
            exact = jax.lax.all_gather(shard, AXIS, tiled=True)
            return (shard, whole), jnp.linalg.norm((whole - exact).astype(jnp.float32))

        start = jnp.zeros((96, 4), dtype)
        (_, whole), errors = jax.lax.scan(
            one, (shard.astype(jnp.float32), start), jnp.arange(200.0)
        )
        return whole, errors

    whole, errors = everywhere("vmap", steps, WORKERS)(shards, drift)
    for row in whole:
        np.testing.assert_array_equal(row, whole[0])
    assert whole.dtype == dtype
    assert np.max(errors[:, 130:]) < 1.3 * np.max(errors[:, 20:90])  # of a whole swing
    assert np.max(errors[:, 130:]) < 0.2 * np.min(errors[:, 0])


def test_what_is_not_finite_is_seen():
    x = jnp.asarray(values((WORKERS, 8))).at[2, 3].set(jnp.nan)

    def both(x):
        scattered = fg.optimizers.compressed_psum_scatter(x, AXIS, SIGN).shard
        return scattered, fg.optimizers.compressed_all_gather(x, AXIS, SIGN)

    shard, whole = everywhere("vmap", both, WORKERS)(x)
    assert np.isnan(shard).tolist() == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert np.isnan(whole).all()


def test_each_step_and_each_worker_has_its_own_dither():
    x = jnp.broadcast_to(jnp.linspace(-1.0, 1.0, 64), (WORKERS, 64))

    def sent(x, step):
        return fg.optimizers.compressed_psum_scatter(
            x, AXIS, fg.UniformQuantizer(bits=2), step=step
        ).sent

    run = jax.jit(jax.vmap(sent, (0, None), axis_name=AXIS))
    rows = [run(x, step) for step in (0, 1)]
    assert len({np.asarray(row).tobytes() for step in rows for row in step}) == 2 * WORKERS
    np.testing.assert_array_equal(run(x, 1), rows[1])


# In a loss


def compiled(loss, check_vma=True):
    """The loss and the gradient of shards, under shard_map."""

    def both(shards, x, step):
        value, grads = jax.value_and_grad(loss)(shards, x, step)
        return jax.lax.psum(value, AXIS), grads

    mapped = jax.shard_map(
        both, mesh=mesh_of(WORKERS), check_vma=check_vma,
        in_specs=(P(AXIS), P(AXIS), P()), out_specs=(P(), P(AXIS)),
    )  # fmt: skip
    return jax.jit(mapped)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_of_a_gather_is_a_scatter(check_vma):
    w, x = jnp.asarray(values((16, 6))), jnp.asarray(values((WORKERS * 5, 16), seed=1))

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    def sharded(shard, x, step, **options):
        return loss(fg.optimizers.gather_parameters(shard, AXIS, step=step, **options), x) / WORKERS

    expected, exact = jax.value_and_grad(loss)(w, x)
    dense = functools.partial(sharded, gradients=fg.Identity())
    value, grads = compiled(dense, check_vma)(w, x, jnp.int32(0))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads, exact, rtol=1e-5, atol=1e-6)

    program = compiled(sharded, check_vma)
    found = np.mean([program(w, x, jnp.int32(i))[1] for i in range(60)], axis=0)
    one = program(w, x, jnp.int32(0))[1]
    error = np.linalg.norm(one - exact) / np.linalg.norm(exact)
    assert 0.01 < error < 0.3
    assert np.linalg.norm(found - exact) < 0.3 * error * np.linalg.norm(exact)  # unbiased
    both = functools.partial(sharded, parameters=LEVELS)
    value, _ = compiled(both, check_vma)(w, x, jnp.int32(0))
    np.testing.assert_allclose(value, expected, rtol=0.05)


def test_the_bytes_of_a_gather_are_those_of_the_program():
    w, x = jnp.asarray(values((64, 128))), jnp.asarray(values((WORKERS * 5, 64), seed=1))

    def sent(kind, **options):
        def loss(shard, x, step):
            return jnp.mean(
                (x @ fg.optimizers.gather_parameters(shard, AXIS, step=step, **options)) ** 2
            )

        found = fg.audit(compiled(loss).lower(w, x, jnp.int32(0)).compile())
        return sum(c.bytes for c in found if c.kind == kind and c.bytes > 100)

    size = w.size // WORKERS
    assert sent("all-gather") == 4 * size
    assert (
        sent("all-gather", parameters=fg.UniformQuantizer(8, bucket=256))
        == 4 + size + 4 * size // 256
    )
    four, eight = (fg.UniformQuantizer(bits, bucket=256) for bits in (4, 8))
    assert sent("all-to-all", gradients=four) == WORKERS * (4 + size // 2 + 4 * size // 256)
    assert sent("all-to-all", gradients=eight) <= 4 * w.size / 3.8
    assert sent("all-to-all") <= 4 * w.size / 7.5


# As an optimizer

SHAPES = {"w": (10, 11), "b": (7,), "deep": (3, 2, 5), "scale": ()}
LIKE = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def run(tx, steps, check_vma=True, params=None, spoil=None):
    """Parameters, state and compiled step, after steps on gradients that differ by worker."""
    params = params or {k: jnp.asarray(values(s, seed=7)) for k, s in SHAPES.items()}
    mesh = mesh_of(WORKERS)
    state = fg.init_state(tx, params, mesh, AXIS)
    specs = fg.state_specs(state, AXIS)

    def step(params, state, rows):
        grads = jax.tree.map(lambda r: r[0], rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs),
        check_vma=check_vma,
    )  # fmt: skip
    program = jax.jit(mapped)
    for i in range(steps):
        grads = gradients(LIKE, WORKERS, seed=i)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        if i == spoil:
            grads["b"] = grads["b"].at[2, 1].set(jnp.nan)
        params, state = program(params, state, grads)
    return params, state, program


def dense(inner, steps, params=None):
    tx = optax.chain(fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS), inner)
    return run(tx, steps, params=params)[0]


LOSSLESS = {"gradients": fg.Identity(), "parameters": fg.Identity()}
INNER = {
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.0, 10), 0.9, nesterov=True),
    "decay of matrices": optax.chain(
        optax.scale_by_lion(),
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
        optax.scale(-0.01),
    ),
}


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("name", INNER)
def test_without_loss_it_is_the_inner_optimizer(name, check_vma):
    tx = fg.optimizers.sharded(INNER[name], WORKERS, axis_name=AXIS, **LOSSLESS)
    params, state, _ = run(tx, 12, check_vma)
    for key, expected in dense(INNER[name], 12).items():
        np.testing.assert_allclose(params[key], expected, rtol=1e-4, atol=1e-5)
    assert int(state.step) == 12


def test_replicas_have_the_same_bits_and_a_quarter_of_the_state():
    tx = fg.optimizers.sharded(optax.adam(0.01), WORKERS)
    params, state, _ = run(tx, 6)
    for leaf in jax.tree.leaves(params):
        assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
    values_of_one = sum(np.asarray(leaf)[0].size for leaf in jax.tree.leaves(state.inner)) - 1
    assert values_of_one == 2 * sum(-(-int(np.prod(s)) // WORKERS) for s in SHAPES.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_stay_near_to_their_owners(dtype):
    """The owner's parameters are in float32; by signs, and in bfloat16, errors do not add up."""
    params = {k: jnp.asarray(values(s, seed=7)).astype(dtype) for k, s in SHAPES.items()}
    tx = fg.optimizers.sharded(optax.sgd(0.01), WORKERS, gradients=fg.Identity(), parameters=SIGN)
    found = []
    for steps in (20, 200):
        _, state, _ = run(tx, steps, params=params)
        found.append(float(optax.tree.norm(state.ahead.value.worker_rows)))
    assert found[1] < 1.5 * found[0]
    exact = {k: p.astype(jnp.float32) for k, p in params.items()}
    wide = dense(optax.sgd(0.01), 200, exact)
    params, state, _ = run(tx, 200, params=params)
    # All that the replicas lack of what the inner optimizer did is in `ahead`.
    lack = _shards.from_shards(state.ahead.value.worker_rows, exact)
    apart = jax.tree.map(lambda p, a, e: p.astype("float32") + a - e, params, lack, wide)
    moved = jax.tree.map(jnp.subtract, wide, exact)
    assert found[1] > 0.03 * float(optax.tree.norm(moved))
    rounding = 1e-5 if dtype == "float32" else 0.01  # of the gradients
    assert float(optax.tree.norm(apart)) < rounding * float(optax.tree.norm(moved))


def test_feedback_is_that_of_the_gradients():
    tx = fg.optimizers.sharded(
        optax.sgd(1.0), WORKERS, gradients=TOP, parameters=fg.Identity(), memory=fg.ErrorFeedback()
    )
    steps = 9
    params, state, _ = run(tx, steps)
    start = {k: np.asarray(values(s, seed=7), np.float64) for k, s in SHAPES.items()}
    for key in SHAPES:
        told = sum(
            np.asarray(gradients(LIKE, WORKERS, seed=i)[key], np.float64).mean(0)
            for i in range(steps)
        )
        left = np.asarray(state.memory.worker_rows.residual[key], np.float64).mean(0)
        np.testing.assert_allclose(start[key] - params[key], told - left, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("memory", [fg.NoMemory(), fg.ErrorFeedback()], ids=["none", "feedback"])
@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(0.01),
        optax.apply_if_finite(optax.adam(0.01), 10**6),
        optax.chain(optax.zero_nans(), optax.adam(0.01)),
    ],
    ids=["adam", "apply_if_finite", "zero_nans"],
)
def test_a_bad_step_leaves_no_trace(inner, memory, check_vma):
    """Also where the inner optimizer hides what is not finite."""
    tx = fg.optimizers.sharded(inner, WORKERS, gradients=SIGN, parameters=SIGN, memory=memory)
    before, good, _ = run(tx, 4, check_vma)
    after, state, _ = run(tx, 5, check_vma, spoil=4)
    for old, new in ((before, after), (good._replace(step=0, skipped=0),
                                       state._replace(step=0, skipped=0))):  # fmt: skip
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(a, b)
    assert (int(state.step), int(state.skipped)) == (5, 1)


def test_its_bytes_are_those_of_two_stages():
    codec = fg.UniformQuantizer(bits=4, bucket=32)
    tx = fg.optimizers.sharded(optax.sgd(0.1), WORKERS, gradients=codec, parameters=codec)
    params, state, program = run(tx, 0)
    sent = fg.audit(program.lower(params, state, gradients(LIKE, WORKERS)).compile())
    expected = fg.wire_bytes(fg.TwoStage(codec, WORKERS), LIKE, fg.Bucketing("leaf"))
    assert sum(c.bytes for c in sent) == expected


def test_another_number_of_workers_is_refused():
    tx = fg.optimizers.sharded(optax.adam(0.1), WORKERS)
    _, state, _ = run(tx, 1)
    same = fg.checkpoint.reshard_state(state, state).state
    np.testing.assert_array_equal(same.ahead.value.worker_rows[0], state.ahead.value.worker_rows[0])
    params = {k: jnp.asarray(values(s, seed=7)) for k, s in SHAPES.items()}
    other = fg.init_state(fg.optimizers.sharded(optax.adam(0.1), 2), params, mesh_of(2), AXIS)
    with pytest.raises(ValueError, match=r"must have the leaves of the new state, got others"):
        fg.checkpoint.reshard_state(state, other)


@pytest.mark.parametrize(
    "inner",
    [
        optax.clip_by_global_norm(1.0),
        optax.chain(optax.clip_by_global_norm(100.0), optax.adam(1e-5)),
        optax.adafactor(0.01),
        optax.lamb(0.01),
        optax.contrib.muon(0.01),
    ],
    ids=["clip", "clip and adam", "adafactor", "lamb", "muon"],
)
def test_what_looks_at_more_than_a_value_is_refused(inner):
    with pytest.raises(ValueError, match=r"sharded\(inner\): must update each value by itself"):
        fg.optimizers.sharded(inner, WORKERS).init(LIKE)


def test_parts_of_the_parameters_have_optimizers_of_their_own():
    """By labels in a tree like the parameters', an empty leaf among them."""
    labels = {"w": "adam", "b": "sgd", "deep": "adam", "scale": "sgd", "empty": "adam"}
    inner = optax.partition({"adam": optax.adam(0.01), "sgd": optax.sgd(0.1)}, labels)
    tx = fg.optimizers.sharded(inner, WORKERS, **LOSSLESS)
    params = {k: jnp.asarray(values(s, seed=7)) for k, s in SHAPES.items()}
    params["empty"] = jnp.zeros((0, 3))
    like = jax.tree.map(jax.typeof, params)

    def step(grads, state):
        return tx.update(grads, state, params)[0]

    state = jax.tree.map(lambda a: jnp.stack([a] * WORKERS), tx.init(params))
    found = everywhere("vmap", step, WORKERS)(gradients(like, WORKERS), state)
    mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), gradients(like, WORKERS))
    expected, _ = inner.update(mean, inner.init(params), params)
    for name, move in expected.items():
        np.testing.assert_allclose(found[name][1], move, rtol=1e-4, atol=1e-6)


def test_mistakes():
    x = jnp.ones((WORKERS, 6, 4))
    on = functools.partial(jax.vmap, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"multiple of 4.*axis 0, got \(6, 4\); pad it"):
        on(lambda x: fg.optimizers.compressed_psum_scatter(x, AXIS).shard)(x)
    with pytest.raises(ValueError, match="axis 2 is out of bounds"):
        on(lambda x: fg.optimizers.compressed_psum_scatter(x, AXIS, scatter_dimension=2).shard)(x)
    with pytest.raises(ValueError, match=r"reference\): must be of shape \(24, 4\).*got \(6, 4\)"):
        on(lambda x: fg.optimizers.compressed_all_gather(x, AXIS, reference=x))(x)
    with pytest.raises(TypeError, match="must be a float32, bfloat16 or float16 array, got int32"):
        on(lambda x: fg.optimizers.compressed_all_gather(x, AXIS))(x.astype(jnp.int32))
    for call in (
        fg.optimizers.compressed_psum_scatter,
        fg.optimizers.compressed_all_gather,
        lambda tree, axis: fg.optimizers.gather_parameters(tree, axis, step=0),
    ):
        with pytest.raises(TypeError, match="got dict; cast it"):
            on(lambda x, call=call: call({"w": x}, AXIS))(x)
    with pytest.raises(TypeError, match=r"codec\): must be a codec, got 8"):
        on(lambda x: fg.optimizers.compressed_all_gather(x, AXIS, 8))(x)
    with pytest.raises(TypeError, match=r"gather_parameters\(gradients\): must be a codec"):
        on(lambda x: fg.optimizers.gather_parameters(x, AXIS, fg.Sign, step=0))(x)
    with pytest.raises(ValueError, match="the axis must be bound where it is called"):
        fg.optimizers.gather_parameters(x[0], AXIS, step=0)
    with pytest.raises(ValueError, match=r"sharded\(workers\): must be the size of the axis"):
        run(fg.optimizers.sharded(optax.sgd(0.1), 2), 1)
    tx = fg.optimizers.sharded(optax.sgd(0.1), WORKERS)
    with pytest.raises(ValueError, match=r"sharded\.update\(params\)"):
        tx.update(LIKE, tx.init(LIKE))
