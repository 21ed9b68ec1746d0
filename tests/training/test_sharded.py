"""Parameters and optimizer states sharded over the axis of the workers: both ways compressed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from cases import gradients, values
from jax.sharding import PartitionSpec as P
from parallel import AXIS, MODES, everywhere, mesh_of

import fftgrad as fg
from fftgrad.exchanges import _shards
from fftgrad.ops import _collectives

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


# The way there and the way back


def gathered(x, codec, **options):
    """The values of all shards, which travel by this codec."""
    return fg.optimizers.gather_parameters(x, AXIS, parameters=codec, **{"step": 0} | options)


def scattered(x, *codec, axis=0):
    """This worker's shard of the sum: the gradient of the shards, for these cotangents."""
    like = jnp.split(x, WORKERS, axis)[0]
    gather = functools.partial(fg.optimizers.gather_parameters, step=0, dimension=axis)
    _, back = jax.vjp(lambda shard: gather(shard, AXIS, *codec), like)
    return back(x)[0]


@pytest.mark.parametrize("codec", [SIGN, TOP], ids=["sign", "top-k"])
def test_a_shard_is_the_sum_of_what_its_owner_got(codec):
    """Compressed as it lies with the cut axis in front."""
    x, axis = values((WORKERS, 8, 12)), 1
    run = everywhere("vmap", lambda x: scattered(x, codec, axis=axis), WORKERS)
    for owner, got in enumerate(jax.device_get(run(x))):
        parts = [rows_of(row, axis, WORKERS)[owner].astype(np.float32) for row in x]
        sent = [np.moveaxis(decoded(codec, np.moveaxis(p, axis, 0)), 0, axis) for p in parts]
        np.testing.assert_array_equal(got, functools.reduce(np.add, sent))


def test_a_gathered_shard_is_a_whole_vector_to_its_codec():
    codec, shards = fg.TopK(k=8), values((WORKERS, 24))
    for whole in np.asarray(everywhere("vmap", lambda x: gathered(x, codec), WORKERS)(shards)):
        np.testing.assert_array_equal(whole, np.ravel([decoded(codec, x, 1) for x in shards]))
        assert np.count_nonzero(whole) == WORKERS * 8


def test_what_is_not_finite_is_seen():
    x = values((WORKERS, 8))
    x[2, 3] = np.nan
    both = everywhere("vmap", lambda x: (scattered(x, SIGN), gathered(x, SIGN)), WORKERS)
    shard, whole = both(x)
    assert np.isnan(shard).tolist() == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert np.isnan(whole).all()


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
    shard = jax.ShapeDtypeStruct((16, 128), "float32")
    size = shard.size

    def sent(**options):
        def loss(shard):
            return jnp.sum(fg.optimizers.gather_parameters(shard, AXIS, step=0, **options) ** 2)

        found = _collectives.collectives(jax.grad(loss), {AXIS: WORKERS}, shard)
        kinds = ("all-gather", "all-to-all")
        return [sum(c.bytes for c in found if c.kind == kind) for kind in kinds]

    there, back = sent()
    assert there == 4 * size
    assert back <= WORKERS * 4 * size / 7.5
    eight = fg.UniformQuantizer(8, bucket=256)
    there, back = sent(parameters=eight, gradients=fg.UniformQuantizer(4, bucket=256))
    assert there == 4 + size + 4 * size // 256
    assert back == WORKERS * (4 + size // 2 + 4 * size // 256)


TWO_BITS = fg.UniformQuantizer(bits=2, bucket=16, norm="max")


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
    x, y = np.tile(values((64,)), (WORKERS, 1)), values((WORKERS, 256), seed=1)

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
    shards = np.frombuffer(first[1], np.float32).reshape(WORKERS, WORKERS, 64)[0]
    assert len({row.tobytes() for row in shards}) == WORKERS  # each worker draws its own
    assert results(jax.random.key(0), 0) == [first]
    for other in (second, *results(1, 0)):
        assert all(a != b for a, b in zip(first, other, strict=True))


# As an optimizer

SHAPES = {"w": (10, 11), "b": (7,), "deep": (3, 2, 5), "scale": ()}
LIKE = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


START = {k: values(s, seed=7) for k, s in SHAPES.items()}
BATCHES = [gradients(LIKE, WORKERS, seed=i) for i in range(5)]


def run(tx, params=START):
    """A compiled step, and the parameters and state from which it starts."""
    mesh = mesh_of(WORKERS)

    def step(params, state, rows):
        grads = jax.tree.map(lambda r: r[0], rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return fg.data_parallel(step, mesh, AXIS), params, fg.init_state(tx, params, mesh, AXIS)


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


WHOLE = functools.partial(fg.optimizers.gather_parameters, step=0)
SGD = optax.sgd(0.1)
TWO = fg.optimizers.sharded(SGD, 2)
WRONG = [
    (lambda x: WHOLE(x, AXIS, dimension=2), "axis 2 is out of bounds"),
    (lambda x: WHOLE(x.astype(int), AXIS), "float32, bfloat16 or float16 array, got int32"),
    (lambda x: WHOLE({"w": x}, AXIS), "got dict; cast"),
    (lambda x: WHOLE(x, AXIS, parameters=8), r"parameters\): must be a codec, got 8"),
    (lambda x: WHOLE(x, AXIS, fg.Sign), r"gather_parameters\(gradients\): must be a codec"),
    # There is no default: draws that repeat in each step add up.
    (lambda x: fg.optimizers.gather_parameters(x, AXIS), "argument: 'step'"),
    (lambda x: WHOLE(x, "other"), "the axis must be bound where it is called"),
    (lambda x: TWO.update(x, TWO.init(x), x), r"sharded\(workers\): must be the size of the axis"),
]


def test_mistakes():
    x = np.ones((WORKERS, 6, 4), np.float32)
    for call, match in WRONG:
        with pytest.raises((TypeError, ValueError), match=match):
            jax.eval_shape(jax.vmap(call, axis_name=AXIS), x)
    tx = fg.optimizers.sharded(SGD, WORKERS)
    with pytest.raises(ValueError, match=r"sharded\.update\(params\)"):
        tx.update(LIKE, jax.eval_shape(tx.init, LIKE))
