"""The step of all workers in one call, against shard_map written out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import values
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import AXIS, assert_close, mesh_of, same, with_model

import fftgrad as fg

STEPS, WORKERS = 4, 8
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
SPARSE = fg.AllGather(fg.chain(fg.ChunkTopK(chunk=5), fg.RangeFloat(8)))
PARAMS = {"up": values((6, 16), 1) / 3, "down": values((16, 2), 2) / 3}
SHARDED = {"up": P(None, "model"), "down": P("model", None)}
X, Y = values((STEPS, 32, 6), 3), np.tanh(values((STEPS, 32, 2), 4))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def split_loss(params, x, y):
    """The same, where each worker of the model axis has a part of the hidden units."""
    hidden = jax.lax.psum(jnp.tanh(x @ params["up"]) @ params["down"], "model")
    return jnp.mean((hidden - y) ** 2)


def transformation(exchange=SPARSE, axis_name=AXIS, memory=None):
    memory = fg.ErrorFeedback() if memory is None else memory
    compressed = fg.compressed_pmean(exchange, memory, axis_name=axis_name)
    return optax.chain(compressed, optax.rmsprop(0.02, bias_correction=True))


def stepper(tx, loss=loss, axis_name=AXIS):
    def step(params, state, x, y):
        value, grads = fg.value_and_grad(loss, axis_name)(params, x, y)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, axis_name)

    return step


def train(run, state):
    params = PARAMS
    for x, y in zip(X, Y, strict=True):
        params, state, value = run(params, state, x, y)
    return params, state, value


@functools.cache
def by_hand(check_vma=True, split=False):
    """What comes of shard_map written out, on a mesh of Auto axes."""
    tx = transformation()
    mesh = with_model() if split else mesh_of(WORKERS)
    param_specs = SHARDED if split else jax.tree.map(lambda _: P(), PARAMS)
    specs = fg.state_specs(jax.eval_shape(tx.init, PARAMS), AXIS, param_specs)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    init = jax.jit(wrap(tx.init, in_specs=(param_specs,), out_specs=specs))
    run = wrap(
        stepper(tx, split_loss if split else loss),
        in_specs=(param_specs, specs, P(AXIS), P(AXIS)),
        out_specs=(param_specs, specs, P()),
    )
    return train(jax.jit(run), init(PARAMS))


# What it is


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_it_is_shard_map_written_out_to_the_bit(kind, check_vma):
    """From arrays on the host, on an Explicit mesh too."""
    tx, mesh = transformation(), mesh_of(WORKERS, kind)
    run = fg.data_parallel(stepper(tx), mesh, AXIS, check_vma=check_vma)
    out = train(run, fg.init_state(tx, PARAMS, mesh, AXIS))
    assert same(out, by_hand(check_vma))
    assert run._cache_size() <= 2  # the first parameters lie elsewhere
    # A restored state lies on no mesh: nothing but the wrapper then names the devices.
    assert same(train(run, jax.device_get(fg.init_state(tx, PARAMS, mesh, AXIS))), out)
    specs = fg.state_specs(out[1], AXIS)
    for leaf, spec in zip(jax.tree.leaves(out[1]), jax.tree.leaves(specs), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PAIRS = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO)]


@pytest.mark.parametrize("kind", PAIRS, ids=str)
def test_parameters_over_another_axis(kind):
    tx, mesh = transformation(), with_model(kind)
    run = fg.data_parallel(stepper(tx, split_loss), mesh, AXIS, param_specs=SHARDED)
    out = train(run, fg.init_state(tx, PARAMS, mesh, AXIS, SHARDED))
    assert same(out, by_hand(split=True))
    assert out[0]["up"].sharding.shard_shape((6, 16)) == (6, 8)


def put(params, mesh):
    return {n: jax.device_put(p, NamedSharding(mesh, SHARDED[n])) for n, p in params.items()}


@pytest.mark.usefixtures("every_platform")
@pytest.mark.parametrize("kind", PAIRS[:2] + PAIRS[3:], ids=str)
def test_without_specs_parameters_stay_sharded_as_they_are(kind):
    """The other axes of the mesh are XLA's, and a step has whole parameters."""
    tx, small = transformation(), mesh_of(4)
    mesh = with_model(kind)

    def whole_loss(params, x, y):
        hidden = jnp.tanh(x @ params["up"])
        out = P() if kind[1] == EXPLICIT else None
        return jnp.mean((jnp.dot(hidden, params["down"], out_sharding=out) - y) ** 2)

    state, params = fg.init_state(tx, put(PARAMS, mesh), mesh, AXIS), put(PARAMS, mesh)
    wanted = fg.init_state(tx, PARAMS, small, AXIS)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    run = fg.data_parallel(stepper(tx, whole_loss), mesh, AXIS)
    found = fg.audit(run.lower(params, state, X[0], Y[0]).compile())
    assert [c.bytes for c in found if c.workers == 4 and c.bytes > 4] == [
        fg.wire_bytes(SPARSE, PARAMS)
    ]
    assert len([c for c in found if c.workers == 2]) < 12, "a codec in pieces"
    out = run(params, state, X[0], Y[0])
    expected = fg.data_parallel(stepper(tx), small, AXIS)(PARAMS, wanted, X[0], Y[0])
    assert_close(out, expected)
    for own, kept in [(params, state), out[:2]]:
        assert own["up"].sharding.shard_shape((6, 16)) == (6, 8)
        assert kept[1][0].nu["down"].sharding.shard_shape((16, 2)) == (8, 2)
        residual = kept[0].memory.worker_rows.residual["up"]
        assert residual.sharding.shard_shape((4, 6, 16)) == (1, 6, 8)


def test_donated_buffers_are_taken():
    tx, mesh = transformation(), mesh_of(WORKERS)
    run = fg.data_parallel(stepper(tx), mesh, AXIS, donate_argnums=(0, 1))
    state = fg.init_state(tx, PARAMS, mesh, AXIS)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    args = params, state, *(jax.device_put(a[0], NamedSharding(mesh, P(AXIS))) for a in (X, Y))
    aliased = run.lower(*args).compile().memory_analysis().alias_size_in_bytes
    rows = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(args[:2]))
    assert aliased == rows
    run(*args)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state[0].memory)))


def test_shared_values_go_before_the_state_and_a_train_state_is_one_argument():
    """In a mesh that is set; shared are a count, which is no parameter, and an average."""
    tx, mesh = transformation(), mesh_of(WORKERS, AxisType.Explicit)
    train_state = TrainState.create(apply_fn=loss, params=PARAMS, tx=tx)
    train_state = train_state.replace(opt_state=fg.init_state(tx, PARAMS, mesh, AXIS))
    ema = optax.ema(0.9)

    def step(average, count, state, x, y):
        value, grads = fg.value_and_grad(state.apply_fn, AXIS)(state.params, x, y)
        state = state.apply_gradients(grads=grads)
        _, average = ema.update(state.params, average)
        return average, count + 1, state, jax.lax.pmean(value, AXIS)

    with jax.set_mesh(mesh):
        run = fg.data_parallel(step, mesh, AXIS)
        carried = jax.jit(ema.init)(PARAMS), 0, train_state
        for x, y in zip(X, Y, strict=True):
            *carried, value = run(*carried, x, y)
    average, count, state = carried
    assert same((state.params, state.opt_state, value), by_hand())
    assert int(count) == int(state.step) == STEPS
    assert average.ema["up"].shape == (6, 16)


# Mistakes


def returns(change):
    """The step, with its results changed."""

    def step(params, state, x, y):
        tx = transformation()
        value, grads = fg.value_and_grad(loss, AXIS)(params, x, y)
        updates, new = tx.update(grads, state, params)
        return change(optax.apply_updates(params, updates), new, value)

    return step


GOOD = stepper(transformation())
WRONG = {
    "a worker's loss": (returns(lambda p, s, v: (p, s, v)), "out_specs"),
    "another order": (returns(lambda p, s, *_: (s, p)), "out_specs"),
    "one alone": (
        returns(lambda p, *_: p),
        r"data_parallel\(step\): .* got dict; write return params, state",
    ),
    "a list": (returns(lambda p, s, *_: [p, s]), r"data_parallel\(step\): .* got list"),
}


@pytest.mark.parametrize(("step", "match"), WRONG.values(), ids=WRONG)
def test_wrong_results_are_answered_while_tracing(step, match):
    tx, mesh = transformation(), mesh_of(WORKERS)
    run = fg.data_parallel(step, mesh, AXIS)
    state = fg.init_state(tx, PARAMS, mesh, AXIS)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, PARAMS, state, X[0], Y[0])


@KINDS
def test_wrong_arguments_are_answered_while_tracing(kind):
    tx, mesh = transformation(), mesh_of(WORKERS, kind)
    state = fg.init_state(tx, PARAMS, mesh, AXIS)
    run = fg.data_parallel(GOOD, mesh, AXIS)
    for args, match in [
        ((PARAMS, X[0], Y[0]), r"state_specs\("),
        ((PARAMS, state, X[0][:9], Y[0]), "evenly divi"),
        ((PARAMS, state, X[0], 1.0), r"data_parallel\(batch\)"),
        ((PARAMS, tx.init(PARAMS), X[0], Y[0]), r"data_parallel\("),
    ]:
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(run, *args)


def test_rows_of_more_workers_are_refused():
    """A step reads the first of its rows, so half of the workers would be dropped in silence."""
    mesh = mesh_of(4)
    run = {"rows": fg.exchanges.PerWorker(jnp.ones((8, 3)))}
    step = fg.data_parallel(lambda run: (run,), mesh, AXIS)
    with pytest.raises(ValueError, match="one row for each of 4 workers"):
        step(run)
