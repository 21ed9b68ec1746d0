"""What `fg.metrics` reads off a state: the same numbers wherever the state is, and no callback."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import gradients
from flax import serialization
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, mesh_of, train_step, zeros

import fftgrad as fg
from fftgrad.optimizers import _fragments

LIKE = {"w": jax.ShapeDtypeStruct((10, 11), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
SPARSE = fg.AllGather(fg.TopK(fraction=0.1))
WORKERS = 4


def of_step(step, bad=False):
    grads = gradients(LIKE, WORKERS, seed=step)
    if bad:
        grads["w"][1, 2, 3] = np.nan
    return grads


def trained(tx, steps=3, bad=()):
    init, update = train_step(tx, WORKERS, like=LIKE)
    state = init(zeros(LIKE))
    for step in range(steps):
        _, state = update(of_step(step, step in bad), state)
    return state


@functools.cache
def plain():
    """A state after three steps of which the second was bad, and the numbers in it."""
    state = trained(pmean(), bad=(1,))
    return state, jax.jit(fg.metrics)(state)


def pmean(exchange=SPARSE, memory=fg.ErrorFeedback(), **kwargs):  # noqa: B008 (a value)
    return fg.compressed_pmean(exchange, memory, axis_name=AXIS, **kwargs)


def root_mean_square(residual):
    """By hand: root of the mean over the workers of squared norms."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(residual)]
    return np.sqrt(np.mean(sum(np.square(a.reshape(WORKERS, -1)).sum(1) for a in leaves)))


def test_counts_and_the_norm_of_the_residual():
    state, found = plain()
    assert list(found) == ["overflow", "residual", "skipped", "step"]
    assert (int(found["step"]), int(found["skipped"]), int(found["overflow"])) == (3, 1, 0)
    wanted = root_mean_square(state.memory.worker_rows.residual)
    np.testing.assert_allclose(found["residual"], wanted, rtol=1e-5)
    assert all(np.shape(value) == () for value in found.values())
    assert "callback" not in jax.jit(fg.metrics).lower(state).as_text()


def test_a_counter_stays_at_the_largest_int32():
    """And a number that tells a bad step from a good one still changes."""
    codec = fg.RangeFloat(bits=8, mantissa=3, limits=(-2.0, 2.0))
    tx = pmean(fg.AllGather(codec), bucketing=fg.Bucketing("leaf", 160))
    init, update = train_step(tx, WORKERS, like=LIKE)
    far = {name: np.full((WORKERS, *leaf.shape), 1e9, np.float32) for name, leaf in LIKE.items()}
    state, most = init(zeros(LIKE)), np.int32(2**31 - 1)
    assert int(update(far, state)[1].overflow) == WORKERS * 117  # of all workers and buckets
    state = state._replace(**dict.fromkeys(("step", "skipped", "overflow"), most))
    for grads, skipped in ((of_step(0), most), (of_step(0, bad=True), 2**30)):
        _, after = update(grads, state)
        counts = (int(after.step), int(after.skipped), int(after.overflow))
        assert counts == (2**30, skipped, most)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_axis_the_workers_are_averaged(check_vma):
    state, wanted = plain()
    inside = jax.shard_map(
        lambda state: fg.metrics(state, axis_name=AXIS),
        mesh=mesh_of(WORKERS),
        in_specs=(fg.state_specs(state, AXIS),),
        out_specs=P(),
        check_vma=check_vma,
    )
    for name, value in jax.jit(inside)(state).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6)


TRANSFORMATIONS = {
    "multi_steps": fg.training.multi_steps(optax.chain(pmean(), optax.adam(0.1)), every=2),
    "chain of a local optimizer": optax.chain(
        fg.training.local_state(optax.scale_by_adam()), pmean()
    ),
    "feedback_adam": fg.optimizers.feedback_adam(0.1, fg.methods.top_k(0.2)),
    "inject_hyperparams": optax.chain(
        pmean(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    ),
    "dgc": fg.compressed_pmean(fg.methods.dgc(0.1), axis_name=AXIS),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_the_state_is_found_wherever_it_is(name):
    """By what is written into a fresh one."""
    tx = TRANSFORMATIONS[name]
    state = jax.eval_shape(tx.init, zeros(LIKE))
    twos = jax.tree.map(lambda a: np.full(a.shape, 2, a.dtype), state)
    found = jax.jit(fg.metrics)(twos)
    assert (int(found["step"]), int(found["skipped"])) == (2, 2)
    np.testing.assert_allclose(found["residual"], 2 * np.sqrt(117), rtol=1e-5)


@pytest.mark.parametrize("as_dicts", [lambda state: state, serialization.to_state_dict])
def test_of_an_optimizer_of_shards_it_shows_what_there_is(as_dicts):
    tx = fg.optimizers.sharded(optax.sgd(0.1), WORKERS, memory=fg.ErrorFeedback(), axis_name=AXIS)
    state = jax.eval_shape(tx.init, zeros(LIKE))
    filled = jax.tree.map(
        lambda a: np.full((WORKERS, *a.shape[1:]) if a.ndim else (), 2.0, np.float32), state
    )
    found = jax.jit(fg.metrics)(as_dicts((filled, optax.EmptyState())))
    assert list(found) == ["residual", "skipped", "step"]
    assert (float(found["step"]), float(found["skipped"])) == (2.0, 2.0)
    np.testing.assert_allclose(found["residual"], 2 * np.sqrt(117))


def test_states_whose_paths_have_the_same_text_are_told_apart():
    state = jax.eval_shape(pmean().init, zeros(LIKE))
    found = jax.eval_shape(fg.metrics, {"a/b": state, "a": {"b": state}})
    assert len([name for name in found if "step" in name]) == 2


def test_several_states_are_told_apart():
    labels = {"w": "sparse", "b": "dense"}
    dense = pmean(fg.AllReduce(), fg.NoMemory(), allow_masked=True)
    tx = optax.partition({"sparse": pmean(allow_masked=True), "dense": dense}, labels)
    state = jax.eval_shape(tx.init, zeros(LIKE))
    found = jax.jit(fg.metrics)(jax.tree.map(lambda a: np.ones(a.shape, a.dtype), state))
    assert len(found) == 8
    sparse, dense = (f"inner_states/{name}/inner_state" for name in ("sparse", "dense"))
    assert float(found[f"{sparse}/residual"]) > 0
    assert float(found[f"{dense}/residual"]) == 0.0
    tx = fg.methods.scale_by_one_bit_adam(2, workers=4)
    one_bit = jax.eval_shape(lambda: fg.metrics(tx.init(zeros(LIKE))))
    assert {key.split("/")[0] for key in one_bit} == {"dense", "compressed"}


def test_memories_inside_an_exchange_have_a_key_of_their_own():
    exchange = fg.Hierarchical("fast", 4, fg.AllGather(fg.Sign()))
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"))
    state = jax.eval_shape(tx.init, zeros(LIKE))
    state = jax.tree.map(lambda a: np.full(a.shape, 2, a.dtype), state)
    kept = jax.tree.leaves(state.exchange[0].own.worker_rows.cut_rows.residual)
    wanted = 2 * np.sqrt(sum(leaf.size for leaf in kept))
    found = jax.jit(fg.metrics)(state)
    np.testing.assert_allclose(found["exchange_residual"], wanted, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_error_of_a_step_is_measured_at_twelve_bytes_more(check_vma):
    like = {**LIKE, "empty": jax.ShapeDtypeStruct((0, 3), "float32")}
    start = {**zeros(LIKE), "empty": np.zeros((0, 3), np.float32)}
    grads = {**of_step(0), "empty": np.zeros((WORKERS, 0, 3), np.float32)}
    found = []
    for measure in (False, True):
        tx = pmean(track_error=measure)
        init, update = train_step(tx, WORKERS, check_vma=check_vma, like=like)
        compiled = update.lower(grads, init(start)).compile()
        mean, state = compiled(grads, init(start))
        found.append((mean, sum(c.bytes for c in fg.audit(compiled))))
    (plain_mean, plain_bytes), (mean, sent) = found
    assert (plain_bytes, sent) == (fg.wire_bytes(SPARSE, LIKE), plain_bytes + 12)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain_mean, mean))
    # In the first step what was not sent is the residual.
    wanted = root_mean_square(state.memory.worker_rows.residual) / root_mean_square(grads)
    assert 0.1 < wanted < 1.0
    np.testing.assert_allclose(state.error, wanted, rtol=1e-5)
    grads["b"][2, 3] = np.inf
    _, after = compiled(grads, state)
    assert float(after.error) == float(state.error)
    grads = jax.tree.map(np.zeros_like, grads)
    _, after = compiled(grads, init(start))
    assert float(after.error) == 0.0


@pytest.mark.parametrize("fragments", [1, 4])
def test_bytes_are_those_of_a_meeting(fragments):
    """Against the compiled program, in which the meeting is the only collective of its size."""
    parts = optax.sgd(0.1), optax.sgd(0.7), 8, SPARSE
    tx = fg.optimizers.diloco(*parts, fragments=fragments, axis_name=AXIS)
    rows = of_step(0)
    state = jax.eval_shape(jax.vmap(tx.init), rows)
    part = jax.eval_shape(lambda tree: _fragments.take(tree, np.int32(0), fragments), LIKE)
    program = everywhere("shard_map unchecked", tx.update, WORKERS)
    audited = fg.audit(program.lower(rows, state, rows).compile())
    assert fg.wire_bytes(SPARSE, part) == sum(c.bytes for c in audited)


@pytest.mark.parametrize("fragments", [1, 2])
def test_states_whose_tuples_have_become_dicts_are_read_alike(fragments):
    nnx = pytest.importorskip("flax.nnx")
    if fragments == 1:
        tx = optax.chain(
            pmean(fg.TwoStage(fg.Sign(), workers=4), track_error=True), optax.adam(0.1)
        )
    else:
        tx = fg.optimizers.diloco(optax.adam(0.1), optax.sgd(0.7), 4, fragments=2)

    def made():
        model = nnx.Linear(10, 11, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(made)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    as_dicts = nnx.state((model, optimizer))

    def ones(tree):
        return jax.tree.map(lambda a: np.ones(a.shape, a.dtype), tree)

    of = jax.jit(fg.metrics)
    expected, filled = of(ones(jax.eval_shape(tx.init, params))), ones(nnx.state(optimizer))
    for state in (filled, nnx.to_pure_dict(filled)):
        found = of(state)
        assert list(expected) == [key.removeprefix("opt_state/") for key in found]
        for (name, value), other in zip(found.items(), expected.values(), strict=True):
            np.testing.assert_allclose(value, other, err_msg=name)
    assert "step" in {key.rpartition("/")[2] for key in jax.eval_shape(fg.metrics, as_dicts)}
