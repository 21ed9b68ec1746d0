"""Parameters and optimizer states sharded over the axis of the workers: both ways compressed."""

import functools
import inspect

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
def test_without_loss_they_are_those_of_jax(mode):
    """Along each axis."""
    x = values((WORKERS, 8, 12, 4))

    def both(x, axis):
        ours = fg.optimizers.compressed_psum_scatter(
            x, AXIS, fg.codecs.Identity(), scatter_dimension=axis
        )
        theirs = jax.lax.psum_scatter(x, AXIS, scatter_dimension=axis % 3, tiled=True)
        whole = fg.optimizers.compressed_all_gather(
            ours.shard, AXIS, fg.codecs.Identity(), gather_dimension=axis
        )
        other = jax.lax.all_gather(theirs, AXIS, axis=axis % 3, tiled=True)
        return (ours.shard, fg_vary(whole), ours.sent), (theirs, other, x)

    found = everywhere(mode, lambda x: [both(x, axis) for axis in (0, 1, -1)], WORKERS)(x)
    for ours, theirs in found:
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def fg_vary(x):
    """Typed as each worker's own, for the results of `everywhere`."""
    return x + 0 * jax.lax.axis_index(AXIS).astype(x.dtype)


@pytest.mark.parametrize("codec", [SIGN, TOP], ids=["sign", "top-k"])
def test_a_shard_is_the_sum_of_what_its_owner_got(codec):
    """Compressed as it lies with the cut axis in front."""
    x, axis = values((WORKERS, 8, 12)), 1
    scatter = functools.partial(
        fg.optimizers.compressed_psum_scatter, axis_name=AXIS, codec=codec, scatter_dimension=axis
    )
    got = jax.device_get(everywhere("vmap", scatter, WORKERS)(x))
    for owner in range(WORKERS):
        parts = [rows_of(row, axis, WORKERS)[owner].astype(np.float32) for row in x]
        sent = [np.moveaxis(decoded(codec, np.moveaxis(p, axis, 0)), 0, axis) for p in parts]
        np.testing.assert_array_equal(got.shard[owner], functools.reduce(np.add, sent))
        for worker in range(WORKERS):
            told = rows_of(got.sent[worker], axis, WORKERS)[owner]
            np.testing.assert_array_equal(told, sent[worker])


def test_a_gathered_shard_is_a_whole_vector_to_its_codec():
    """All k coefficients of each shard, at the bytes of that codec and that vector."""
    codec, shards = fg.TopK(k=8), values((WORKERS, 24))
    gather = functools.partial(fg.optimizers.compressed_all_gather, axis_name=AXIS, codec=codec)
    run = jax.shard_map(
        lambda x: gather(x[0]), mesh=mesh_of(WORKERS), in_specs=P(AXIS), out_specs=P()
    )
    compiled = jax.jit(run).lower(shards).compile()
    whole = np.asarray(compiled(shards))
    np.testing.assert_array_equal(whole, np.ravel([decoded(codec, x, 1) for x in shards]))
    assert np.count_nonzero(whole) == WORKERS * 8
    (sent,) = fg.audit(compiled)
    assert sent.bytes == fg.wire_bytes(codec, shards[0])


@pytest.mark.parametrize(
    ("codec", "dtype"), [(TOP, "bfloat16"), (fg.UniformQuantizer(4, 16, norm="max"), "float32")]
)
def test_differences_do_not_add_up(codec, dtype):
    """After 200 gathers as near as after 20."""
    shards = values((WORKERS, 24, 4)).astype(dtype)
    drift = np.float32(0.01) * values((WORKERS, 24, 4), seed=1)

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

    whole, errors = jax.device_get(everywhere("vmap", steps, WORKERS)(shards, drift))
    for row in whole:
        np.testing.assert_array_equal(row, whole[0])
    assert whole.dtype == dtype
    assert np.max(errors[:, 130:]) < 1.3 * np.max(errors[:, 20:90])  # of a whole swing
    assert np.max(errors[:, 130:]) < 0.2 * np.min(errors[:, 0])


def test_what_is_not_finite_is_seen():
    x = values((WORKERS, 8))
    x[2, 3] = np.nan

    def both(x):
        scattered = fg.optimizers.compressed_psum_scatter(x, AXIS, SIGN).shard
        return scattered, fg.optimizers.compressed_all_gather(x, AXIS, SIGN)

    shard, whole = everywhere("vmap", both, WORKERS)(x)
    assert np.isnan(shard).tolist() == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert np.isnan(whole).all()


def test_each_step_and_each_worker_has_its_own_dither():
    x = np.broadcast_to(np.linspace(-1, 1, 64, dtype=np.float32), (WORKERS, 64))

    def sent(x, step):
        return fg.optimizers.compressed_psum_scatter(
            x, AXIS, fg.UniformQuantizer(bits=2), step=step
        ).sent

    run = jax.jit(jax.vmap(sent, (0, None), axis_name=AXIS))
    rows = [np.asarray(run(x, step)) for step in (0, 1)]
    assert len({row.tobytes() for step in rows for row in step}) == 2 * WORKERS


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
    w, x = values((16, 6)), values((WORKERS * 5, 16), seed=1)

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    def sharded(shard, x, step, **options):
        return loss(fg.optimizers.gather_parameters(shard, AXIS, step=step, **options), x) / WORKERS

    expected, exact = jax.device_get(jax.jit(jax.value_and_grad(loss))(w, x))
    dense = functools.partial(sharded, gradients=fg.codecs.Identity(), parameters=LEVELS)
    value, grads = compiled(dense, check_vma)(w, x, np.int32(0))
    np.testing.assert_allclose(value, expected, rtol=0.05)
    np.testing.assert_allclose(grads, exact, rtol=0.1, atol=0.02 * np.abs(exact).max())

    program = compiled(sharded, check_vma)
    results = [jax.device_get(program(w, x, np.int32(i))) for i in range(60)]
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-5)
    norm, one = np.linalg.norm(exact), results[0][1]
    error = np.linalg.norm(one - exact) / norm
    assert 0.01 < error < 0.3
    mean = np.mean([grads for _, grads in results], axis=0)
    assert np.linalg.norm(mean - exact) < 0.3 * error * norm  # unbiased


def test_the_bytes_of_a_gather_are_those_of_the_program():
    w, x = values((64, 128)), values((WORKERS * 5, 64), seed=1)
    size = w.size // WORKERS

    def sent(**options):
        def loss(shard, x, step):
            return jnp.mean(
                (x @ fg.optimizers.gather_parameters(shard, AXIS, step=step, **options)) ** 2
            )

        found = fg.audit(compiled(loss).lower(w, x, np.int32(0)).compile())
        kinds = ("all-gather", "all-to-all")
        return [sum(c.bytes for c in found if c.kind == k and c.bytes > 100) for k in kinds]

    there, back = sent()
    assert there == 4 * size
    assert back <= 4 * w.size / 7.5
    eight = fg.UniformQuantizer(8, bucket=256)
    there, back = sent(parameters=eight, gradients=fg.UniformQuantizer(4, bucket=256))
    assert there == 4 + size + 4 * size // 256
    assert back == WORKERS * (4 + size // 2 + 4 * size // 256)


TWO_BITS = fg.UniformQuantizer(bits=2, bucket=16, norm="max")
FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformQuantizer(bits=4, bucket=256, norm="max"))
EIGHT = fg.UniformQuantizer(bits=8, bucket=256, norm="max")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "parameters", [None, fg.codecs.Identity()], ids=["as they are", "by a codec"]
)
def test_shards_follow_each_other_along_any_axis(parameters, mode):
    """The whole, and the gradient of a loss that tells all its values apart."""
    shards = values((WORKERS, 3, 2, 5))
    factors = values((WORKERS, 3 * 2 * 5 * WORKERS), seed=1)

    def loss(shard, factor, axis):
        found = fg.optimizers.gather_parameters(
            shard, AXIS, fg.codecs.Identity(), parameters=parameters, dimension=axis, step=0
        )
        return jnp.sum(found * factor.reshape(found.shape)), found

    def both(shard, factor):
        grad = jax.grad(loss, has_aux=True)
        return [grad(shard, factor, axis) for axis in (1, -1, 0)]

    found = jax.device_get(everywhere(mode, both, WORKERS)(shards, factors))
    for axis, (grads, rows) in zip((1, -1, 0), found, strict=True):
        whole = np.concatenate(list(shards), axis=axis)
        np.testing.assert_allclose(rows, np.broadcast_to(whole, rows.shape), rtol=1e-6)
        total = factors.astype(np.float64).sum(0).reshape(whole.shape)
        expected = np.stack(np.split(total, WORKERS, axis=axis))
        np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-4)


def test_steps_and_keys_draw_anew_on_both_ways():
    x, y = values((WORKERS, 64)), values((WORKERS, 256), seed=1)

    def loss(shard, factor, step, key):
        found = fg.optimizers.gather_parameters(
            shard, AXIS, TWO_BITS, parameters=TWO_BITS, step=step, key=key
        )
        return jnp.sum(found * factor), found

    def results(key, *steps):
        both = jax.grad(functools.partial(loss, key=key), has_aux=True)
        run = jax.jit(jax.vmap(both, (0, 0, None), axis_name=AXIS))
        return [[np.asarray(a).tobytes() for a in run(x, y, np.int32(n))] for n in steps]

    first, second = results(0, 0, 1)
    assert results(jax.random.key(0), 0) == [first]
    for other in (second, *results(1, 0)):
        assert all(a != b for a, b in zip(first, other, strict=True))


# What is taken where nothing is said


def test_what_is_taken_by_itself():
    """And there is no default for the step: draws that repeat in each step add up."""
    own = fg.optimizers

    def default(function, argument):
        return inspect.signature(function).parameters[argument].default

    assert default(own.compressed_psum_scatter, "codec") == FOUR
    assert default(own.gather_parameters, "gradients") == FOUR
    assert default(own.sharded, "gradients") == FOUR
    assert default(own.compressed_all_gather, "codec") == EIGHT
    assert default(own.sharded, "parameters") == EIGHT
    assert default(own.gather_parameters, "step") is inspect.Parameter.empty


# As an optimizer

SHAPES = {"w": (10, 11), "b": (7,), "deep": (3, 2, 5), "scale": ()}
LIKE = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


START = {k: values(s, seed=7) for k, s in SHAPES.items()}
BATCHES = [gradients(LIKE, WORKERS, seed=i) for i in range(5)]


def run(tx, check_vma=True, params=START):
    """A compiled step, and the parameters and state from which it starts."""
    state = fg.init_state(tx, params, mesh_of(WORKERS), AXIS)
    specs = fg.state_specs(state, AXIS)

    def step(params, state, rows):
        grads = jax.tree.map(lambda r: r[0], rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh_of(WORKERS), in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs),
        check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(mapped), params, state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_stay_near_to_their_owners(dtype):
    """The owner's parameters are in float32; by signs, and in bfloat16, errors do not add up."""
    start = {k: p.astype(dtype) for k, p in START.items()}
    tx = fg.optimizers.sharded(
        optax.sgd(0.01), WORKERS, gradients=fg.codecs.Identity(), parameters=SIGN
    )
    step, params, state = run(tx, params=start)
    wide, found = {k: p.astype(np.float64) for k, p in start.items()}, []
    for i in range(200):
        grads = {k: g.astype(dtype) for k, g in BATCHES[i % 5].items()}
        params, state = step(params, state, grads)
        wide = {k: p - 0.01 * grads[k].astype(np.float64).mean(0) for k, p in wide.items()}
        if i in (19, 199):
            ahead = jax.device_get(state.ahead.worker_rows.reset_rows)
            found.append(norm(ahead))
    for leaf in jax.tree.leaves(params):
        assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
    assert found[1] < 1.5 * found[0]
    # All that the replicas lack of what the inner optimizer did is in `ahead`.
    whole = jax.jit(_shards.from_shards)(ahead, jax.tree.map(np.float32, start))
    lack = jax.device_get(whole)
    apart = {k: np.asarray(p).astype(np.float64) + lack[k] - wide[k] for k, p in params.items()}
    moved = norm({k: p - start[k].astype(np.float64) for k, p in wide.items()})
    assert found[1] > 0.01 * moved
    rounding = 1e-4 if dtype == "float32" else 0.01  # of the gradients
    assert norm(apart) < rounding * moved


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


def test_feedback_is_that_of_the_gradients_at_a_quarter_of_the_state():
    tx = fg.optimizers.sharded(
        optax.sgd(1.0, 1e-9), WORKERS, gradients=TOP, parameters=fg.codecs.Identity(),
        memory=fg.ErrorFeedback(),
    )  # fmt: skip
    odd = {key: START[key] for key in ("w", "b")}
    step, params, state = run(tx, params=odd)
    for grads in BATCHES:
        params, state = step(params, state, {key: grads[key] for key in odd})
    params = jax.device_get(params)
    for key, start in odd.items():
        told = sum(grads[key].astype(np.float64).mean(0) for grads in BATCHES)
        left = np.asarray(state.memory.worker_rows.residual[key], np.float64).mean(0)
        np.testing.assert_allclose(start - params[key], told - left, rtol=1e-4, atol=1e-4)
    values_of_one = sum(np.asarray(leaf)[0].size for leaf in jax.tree.leaves(state.inner))
    assert values_of_one == sum(-(-leaf.size // WORKERS) for leaf in odd.values())


HIDING = optax.chain(optax.zero_nans(), optax.sgd(0.01, 0.9))


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(
    ("inner", "memory"), [(optax.sgd(0.01, 0.9), fg.NoMemory()), (HIDING, fg.ErrorFeedback())]
)
def test_a_bad_step_leaves_no_trace(inner, memory, check_vma):
    """Also where the inner optimizer hides what is not finite."""
    tx = fg.optimizers.sharded(inner, WORKERS, gradients=SIGN, parameters=SIGN, memory=memory)
    step, params, state = run(tx, check_vma)
    before = step(params, state, BATCHES[0])
    bad = BATCHES[1] | {"b": BATCHES[1]["b"].copy()}
    bad["b"][2, 1] = np.nan
    params, after = step(*before, bad)
    counts = {"step": before[1].step, "skipped": before[1].skipped}
    jax.tree.map(np.testing.assert_array_equal, before, (params, after._replace(**counts)))
    assert (int(after.step), int(after.skipped)) == (2, 1)


SCATTER, GATHER = fg.optimizers.compressed_psum_scatter, fg.optimizers.compressed_all_gather
WHOLE = functools.partial(fg.optimizers.gather_parameters, step=0)
TWO = fg.optimizers.sharded(optax.sgd(0.1), 2)
WRONG = [
    (lambda x: SCATTER(x, AXIS).shard, "reshape"),
    (lambda x: SCATTER(x, AXIS, scatter_dimension=2).shard, "axis 2 is out of bounds"),
    (
        lambda x: GATHER(x, AXIS, reference=x),
        r"reference\): must be of shape \(24, 4\), .*\(6, 4\)",
    ),
    (lambda x: GATHER(x.astype(int), AXIS), "float32, bfloat16 or float16 array, got int32"),
    *(
        (lambda x, call=call: call({"w": x}, AXIS), "got dict; cast")
        for call in (SCATTER, GATHER, WHOLE)
    ),
    (lambda x: GATHER(x, AXIS, 8), r"codec\): must be a codec, got 8"),
    (lambda x: WHOLE(x, AXIS, fg.Sign), r"gather_parameters\(gradients\): must be a codec"),
    (lambda x: WHOLE(x, "other"), "the axis must be bound where it is called"),
    (lambda x: TWO.update(x, TWO.init(x), x), r"sharded\(workers\): must be the size of the axis"),
]


def test_mistakes():
    x = np.ones((WORKERS, 6, 4), np.float32)
    for call, match in WRONG:
        with pytest.raises((TypeError, ValueError), match=match):
            jax.eval_shape(jax.vmap(call, axis_name=AXIS), x)
    tx = fg.optimizers.sharded(optax.sgd(0.1), WORKERS)
    with pytest.raises(ValueError, match=r"sharded\.update\(params\)"):
        tx.update(LIKE, jax.eval_shape(tx.init, LIKE))
