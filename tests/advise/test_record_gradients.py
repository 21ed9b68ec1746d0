"""What is captured is each worker's own gradient of these steps, to the bit, and nothing else."""

import functools
import re

import captured_program
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from parallel import AXIS, MODES, everywhere, mesh_of
from processes import ROOT, free_port, running

import fftgrad as fg
from fftgrad import checkpoint

LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
ZEROS = {"w": jnp.zeros((10, 11)), "b": jnp.zeros(7)}
WORKERS = 4
STEPS = (3, 0, 9)
BATCHES = [gradients(LIKE, WORKERS, seed=seed) for seed in range(5)]


@functools.cache
def compressed():
    exchange = fg.AllGather(fg.TopK(fraction=0.1))
    return optax.chain(
        fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS), optax.sgd(0.1)
    )


@functools.cache
def with_capture(steps=STEPS):
    return optax.chain(fg.advise.record_gradients(steps), compressed())


def start(tx, workers=WORKERS):
    return fg.init_state(tx, ZEROS, mesh_of(workers), AXIS)


@functools.cache
def trainer(tx, workers=WORKERS, **options):
    """Compiled once for each transformation."""

    def step(params, state, own):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], own), state, params)
        return optax.apply_updates(params, updates), state

    return fg.data_parallel(step, mesh_of(workers), AXIS, **options)


def trained(tx, batches=BATCHES, state=None, **options):
    train, params, state = trainer(tx, **options), ZEROS, start(tx) if state is None else state
    for batch in batches:
        params, state = train(params, state, batch)
    return params, state


def assert_captured(found, steps, workers=WORKERS):
    """Those steps, each with the rows of its batch."""
    assert found.steps == steps
    for step in steps:
        assert sorted(found.gradients[step]) == list(range(workers))
        for worker, tree in found.gradients[step].items():
            assert tree.keys() == ZEROS.keys()
            for name, leaf in tree.items():
                assert isinstance(leaf, np.ndarray)
                assert leaf.tobytes() == np.asarray(BATCHES[step][name][worker]).tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_it_keeps_the_gradients_of_these_steps_and_passes_all_on(mode):
    tx = fg.advise.record_gradients(STEPS)
    update = everywhere(mode, tx.update, WORKERS)
    state = jax.tree.map(lambda a: jnp.stack([a] * WORKERS), tx.init(ZEROS))
    assert fg.advise.recorded(state).steps == ()
    for number, batch in enumerate(BATCHES):
        out, state = update(batch, state)
        assert jax.tree.all(jax.tree.map(np.array_equal, out, batch))
        assert_captured(fg.advise.recorded(state), (0,) if number < 3 else (0, 3))


@pytest.mark.parametrize(
    "options",
    [{}, {"check_vma": False}, {"donate_argnums": 1}],
    ids=["checked", "unchecked", "donated"],
)
def test_training_is_as_without_it(options):
    params, state = trained(with_capture(), **options)
    wanted, _ = trained(compressed(), **options)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, wanted))
    assert np.any(params["w"] != 0)
    assert_captured(fg.advise.recorded(state), (0, 3))
    assert_captured(fg.advise.recorded({"opt": [state, 1]}), (0, 3))


def test_one_worker_needs_no_axis():
    tx, batches = fg.advise.record_gradients((1,)), [jnp.arange(3.0) + i for i in range(3)]
    state, update = tx.init(batches[0]), jax.jit(tx.update)
    for batch in batches:
        _, state = update(batch, state)
    assert fg.advise.recorded(state).gradients[1][0].tolist() == [1.0, 2.0, 3.0]


def test_in_bfloat16_it_is_rounded():
    tx, batch = fg.advise.record_gradients((0,), dtype="bfloat16"), jnp.array([1.0, 1.001, -3.3])
    _, state = tx.update(batch, tx.init(batch))
    (found,) = fg.advise.recorded(state).gradients[0].values()
    assert found.tobytes() == np.asarray(batch.astype("bfloat16")).tobytes()


def test_a_step_that_is_not_captured_touches_no_slot():
    """Donated, the slots stay where they are, and what is copied is the gradient to be kept."""
    tx, like = fg.advise.record_gradients((10, 100, 1000)), {"w": jnp.zeros((512, 8))}
    mesh = mesh_of(2)
    state = fg.init_state(tx, like, mesh, AXIS)

    def step(state, own):
        return (tx.update(jax.tree.map(lambda g: jnp.sin(g[0]), own), state)[1],)

    train = fg.data_parallel(step, mesh, AXIS, donate_argnums=0)
    program = train.lower(state, {"w": jnp.ones((2, 512, 8))}).compile().as_text()
    assert len(re.findall(r"conditional\(", program)) == 3
    aliased = re.search(r"input_output_alias=\{(.*?) \}, entry", program)
    assert aliased is not None
    assert aliased[1].count("may-alias") + aliased[1].count("must-alias") == 7
    for computation in re.split(r"\n\n", program):
        copies = re.findall(r"f32\[1,512,8\]\S* copy\(|f32\[512,8\]\S* copy\(", computation)
        assert len(copies) <= 1, computation
        assert not copies or "ENTRY" not in computation, computation


def test_a_checkpoint_has_it(tmp_path):
    tx = with_capture()
    _, state = trained(tx, BATCHES[:2])
    checkpoint.save(tmp_path, 2, state)
    found = checkpoint.restore(tmp_path, start(tx))
    assert found.anew == found.left == ()
    assert_captured(fg.advise.recorded(found.tree), (0,))
    _, state = trained(tx, BATCHES[2:], found.tree)
    assert_captured(fg.advise.recorded(state), (0, 3))


def test_with_other_steps_it_says_which_are_in_the_slots(tmp_path):
    _, state = trained(with_capture((0, 1)), BATCHES[:2])
    checkpoint.save(tmp_path, 2, state)
    other = with_capture((3, 50))
    state = checkpoint.restore(tmp_path, start(other)).tree
    assert_captured(fg.advise.recorded(state), (0, 1))
    _, state = trained(other, BATCHES[2:], state)
    assert_captured(fg.advise.recorded(state), (1, 3))


def test_specs_shard_it_over_the_workers_and_as_the_parameters_are():
    state = jax.eval_shape(with_capture().init, ZEROS)
    specs = fg.state_specs(state, AXIS)[0]
    assert set(jax.tree.leaves(specs.gradients, is_leaf=lambda s: isinstance(s, P))) == {P(AXIS)}
    assert specs.step == P()
    assert set(specs.taken) == {P()}
    own = fg.state_specs(state, AXIS, {"w": P(None, "model"), "b": P()})[0]
    assert own.gradients.worker_rows[1] == {"w": P(AXIS, None, "model"), "b": P(AXIS)}
    assert set(own.taken) == {P()}


def test_of_parameters_sharded_over_a_model_axis_it_returns_the_whole():
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axes, devices=jax.devices()[:4])
    own, tx = {"w": P("model"), "b": P()}, fg.advise.record_gradients((0,))
    state = fg.init_state(tx, ZEROS, mesh, AXIS, own)
    specs = fg.state_specs(state, AXIS, own)
    rows = jax.tree.map(lambda spec: P(AXIS, *spec), own, is_leaf=lambda node: isinstance(node, P))
    step = jax.jit(
        jax.shard_map(
            lambda g, state: tx.update(jax.tree.map(lambda a: a[0], g), state)[1],
            mesh=mesh,
            in_specs=(rows, specs),
            out_specs=specs,
        )
    )
    batch = jax.tree.map(lambda g: g[:2], BATCHES[0])
    assert_captured(fg.advise.recorded(step(batch, state)), (0,), workers=2)


@pytest.mark.processes
def test_each_process_has_the_rows_of_its_own_workers(tmp_path):
    """And all of them together those of all, also where each has a shard of the parameters."""
    address = f"localhost:{free_port()}"
    files = [tmp_path / f"{number}.npz" for number in range(2)]
    commands = [
        [str(ROOT / "tests/captured_program.py"), address, "2", str(number), str(file)]
        for number, file in enumerate(files)
    ]
    with running(tmp_path, commands, cache=tmp_path / "compiled") as processes:
        for process in processes:
            assert process.wait() == 0, process.err.read_text()
            assert "process_allgather" in process.told[0]
    assert [list(fg.advise.load_gradients(file).gradients[0]) for file in files] == [[0, 1], [2, 3]]
    halves = [tmp_path / f"{number}.npz.halves.npz" for number in range(2)]
    for paths, workers in ((files, 4), (halves, 2)):
        wanted = gradients(captured_program.LIKE, workers)
        found = fg.advise.load_gradients(*paths).gradients[0]
        assert list(found) == list(range(workers))
        for worker, tree in found.items():
            for name, leaf in tree.items():
                assert leaf.tobytes() == np.asarray(wanted[name][worker]).tobytes()


def test_flax_states_have_it_as_dicts():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    state = nnx.state(nnx.Optimizer(model, with_capture(), wrt=nnx.Param))
    specs = fg.state_specs(state, AXIS)["opt_state"][0]
    assert set(jax.tree.leaves(nnx.to_pure_dict(specs)["gradients"])) == {P(AXIS)}
    assert set(jax.tree.leaves(nnx.to_pure_dict(specs)["taken"])) == {P()}
    assert fg.advise.recorded(state).steps == ()


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda: fg.advise.record_gradients(()), ValueError, r"use \(10, 100, 1000\)"),
        (lambda: fg.advise.record_gradients((1, 1)), ValueError, "each once"),
        (lambda: fg.advise.record_gradients((-1,)), ValueError, "at least 0, got -1"),
        (lambda: fg.advise.record_gradients((1.5,)), TypeError, "whole number, got 1.5"),
        (lambda: fg.advise.record_gradients(10), TypeError, "got 10; use"),
        (lambda: fg.advise.record_gradients((1,), dtype="int8"), ValueError, "use 'float32'"),
        (lambda: fg.advise.recorded({}), ValueError, "got 0; put fg.advise.record_gradients"),
        (
            lambda: fg.advise.recorded([fg.advise.record_gradients((1,)).init(ZEROS)] * 2),
            ValueError,
            "got 2",
        ),
        (
            lambda: jax.jit(lambda s: fg.advise.recorded(s))(
                fg.advise.record_gradients((1,)).init(ZEROS)
            ),
            TypeError,
            "outside of jax.jit",
        ),
    ],
)
def test_mistakes_are_answered(call, error, remedy):
    with pytest.raises(error, match=remedy):
        call()
