"""What `fg.metrics` reads off a state: the same numbers wherever the state is, and no callback."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients
from flax import serialization
from jax.sharding import PartitionSpec as P
from parallel import AXIS, mesh_of, train_step

import fftgrad as fg

LIKE = {
    "w": jax.ShapeDtypeStruct((10, 11), "float32"),
    "b": jax.ShapeDtypeStruct((7,), "float32"),
}
SPARSE = fg.AllGather(fg.TopK(fraction=0.1))
WORKERS = 4


def zeros():
    return jax.tree.map(lambda s: jnp.zeros(s.shape), LIKE)


def trained(tx, steps=3, bad=()):
    init, update = train_step(tx, WORKERS, like=LIKE)
    state = init(zeros())
    for step in range(steps):
        grads = gradients(LIKE, WORKERS, seed=step)
        if step in bad:
            grads["w"] = grads["w"].at[1, 2, 3].set(jnp.nan)
        _, state = update(grads, state)
    return state


def pmean(exchange=SPARSE, memory=fg.ErrorFeedback(), **kwargs):  # noqa: B008 (a value)
    return fg.compressed_pmean(exchange, memory, axis_name=AXIS, **kwargs)


def root_mean_square(residual):
    """By hand: root of the mean over the workers of squared norms."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(residual)]
    return np.sqrt(np.mean(sum(np.square(a.reshape(WORKERS, -1)).sum(1) for a in leaves)))


def test_counts_and_the_norm_of_the_residual():
    state = trained(optax.chain(pmean(), optax.sgd(0.1)), bad=(1,))
    found = fg.metrics(state)
    assert list(found) == ["step", "skipped", "overflow", "residual"]
    assert (int(found["step"]), int(found["skipped"]), int(found["overflow"])) == (3, 1, 0)
    wanted = root_mean_square(state[0].memory.worker_rows.residual)
    np.testing.assert_allclose(found["residual"], wanted, rtol=1e-5)
    assert all(np.shape(value) == () for value in found.values())


def test_a_counter_stays_at_the_largest_int32():
    """And a number that tells a bad step from a good one still changes."""
    codec = fg.codecs.FixedRangeFloat(bits=8, mantissa=3, maximum=2.0, eps=0.125)
    init, update = train_step(pmean(fg.AllGather(codec)), WORKERS, like=LIKE)
    state, most = init(zeros()), jnp.int32(2**31 - 1)
    names = ("step", "skipped", "overflow")
    state = state._replace(**dict.fromkeys(names, most))
    grads = gradients(LIKE, WORKERS)
    _, good = update(grads, state)
    _, bad = update(jax.tree.map(lambda g: g.at[1, 2].set(jnp.nan), grads), state)
    for after in (good, bad):
        found = fg.metrics(after)
        assert {int(found[name]) for name in ("overflow",)} == {int(most)}
        assert int(found["step"]) == 2**30
    assert int(good.skipped) == most
    assert int(bad.skipped) == 2**30


def test_values_beyond_a_range_are_counted():
    codec = fg.codecs.FixedRangeFloat(bits=8, mantissa=3, maximum=2.0, eps=0.125)
    state = trained(pmean(fg.AllGather(codec)), steps=1)
    assert int(fg.metrics(state)["overflow"]) == int(state.overflow) > 0
    tx = pmean(fg.AllGather(codec), bucketing=fg.Bucketing("leaf", 160))
    far = dict.fromkeys("ab", jnp.full((2, 40), 1e9))
    found = jax.vmap(lambda g: tx.update(g, tx.init(g))[1], axis_name=AXIS)(far)
    assert found.overflow.tolist() == [2 * 2 * 40] * 2  # of two workers and two buckets


def test_jit_changes_nothing_and_calls_no_host():
    state = trained(pmean())
    lowered = jax.jit(fg.metrics).lower(state)
    assert "callback" not in lowered.as_text()
    found = lowered.compile()(state)
    for name, value in fg.metrics(state).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_axis_the_workers_are_averaged(check_vma):
    state = trained(pmean())
    inside = jax.shard_map(
        lambda state: fg.metrics(state, axis_name=AXIS),
        mesh=mesh_of(WORKERS),
        in_specs=(fg.state_specs(state, AXIS),),
        out_specs=P(),
        check_vma=check_vma,
    )
    for name, value in jax.jit(inside)(state).items():
        np.testing.assert_allclose(value, fg.metrics(state)[name], rtol=1e-6)


TRANSFORMATIONS = {
    "multi_steps": fg.multi_steps(optax.chain(pmean(), optax.adam(0.1)), every=2),
    "chain of a local optimizer": optax.chain(fg.local_state(optax.scale_by_adam()), pmean()),
    "feedback_adam": fg.optimizers.feedback_adam(0.1, fg.methods.top_k(0.2)),
    "feedback_sgd": fg.optimizers.feedback_sgd(0.1, 0.9, fg.methods.top_k(0.2)),
    "inject_hyperparams": optax.chain(
        pmean(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    ),
    "apply_if_finite": optax.chain(pmean(), optax.apply_if_finite(optax.sgd(0.1), 3)),
    "delay": optax.chain(fg.training.delay(), pmean()),
    "dgc": fg.compressed_pmean(fg.methods.dgc(0.1), axis_name=AXIS),
    "clip": optax.chain(fg.training.clip_by_local_norm(1.0), pmean()),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_the_state_is_found_wherever_it_is(name):
    found = fg.metrics(trained(TRANSFORMATIONS[name], steps=2))
    assert int(found["step"]) == (1 if name == "multi_steps" else 2)
    assert float(found["residual"]) > 0 or name == "delay"


@pytest.mark.parametrize("as_dicts", [lambda state: state, serialization.to_state_dict])
def test_of_an_optimizer_of_shards_it_shows_what_there_is(as_dicts):
    tx = fg.optimizers.sharded(optax.adam(0.1), WORKERS, memory=fg.ErrorFeedback(), axis_name=AXIS)
    state = jax.eval_shape(tx.init, zeros())
    filled = jax.tree.map(lambda a: jnp.full((WORKERS, *a.shape[1:]) if a.ndim else (), 2.0), state)
    found = fg.metrics(as_dicts((filled, optax.EmptyState())))
    assert list(found) == ["step", "skipped", "residual"]
    assert (float(found["step"]), float(found["skipped"])) == (2.0, 2.0)
    np.testing.assert_allclose(found["residual"], 2 * np.sqrt(117))


def test_diloco_is_found():
    tx = fg.optimizers.diloco(optax.sgd(0.1), optax.sgd(0.7), sync_every=2, axis_name=AXIS)
    counts = dict.fromkeys(("step", "skipped", "overflow"), 0)
    assert fg.metrics(tx.init(zeros())) == counts | {"residual": 0.0}


def test_states_whose_paths_have_the_same_text_are_told_apart():
    state = pmean().init(zeros())
    found = fg.metrics({"a/b": state, "a": {"b": state._replace(step=state.step + 1)}})
    assert sorted(int(count) for name, count in found.items() if "step" in name) == [0, 1]


def test_several_states_are_told_apart():
    labels = {"w": "sparse", "b": "dense"}
    tx = optax.partition(
        {
            "sparse": pmean(allow_masked=True),
            "dense": pmean(fg.AllReduce(), fg.NoMemory(), allow_masked=True),
        },
        labels,
    )
    found = fg.metrics(trained(tx))
    assert len(found) == 8
    sparse, dense = (f"inner_states/{name}/inner_state" for name in ("sparse", "dense"))
    assert float(found[f"{sparse}/residual"]) > 0
    assert float(found[f"{dense}/residual"]) == 0.0
    one_bit = fg.metrics(fg.methods.scale_by_one_bit_adam(2, workers=4).init(zeros()))
    assert {key.split("/")[0] for key in one_bit} == {"dense", "compressed"}


def test_only_the_residual_of_a_memory_is_counted():
    state = trained(pmean(memory=fg.MomentumCorrection(0.9)))
    wanted = root_mean_square(state.memory.worker_rows.residual)
    np.testing.assert_allclose(fg.metrics(state)["residual"], wanted, rtol=1e-5)


def test_memories_inside_an_exchange_have_a_key_of_their_own():
    exchange = fg.Hierarchical("fast", 4, fg.AllGather(fg.Sign()))
    tx = fg.compressed_pmean(exchange, axis_name=("slow", "fast"))
    state = jax.tree.map(lambda a: jnp.full(a.shape, 2, a.dtype), tx.init(zeros()))
    kept = jax.tree.leaves(state.exchange[0].shards.worker_rows.memory.residual)
    wanted = 2 * np.sqrt(sum(leaf.size for leaf in kept))
    np.testing.assert_allclose(fg.metrics(state)["exchange_residual"], wanted, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_error_of_a_step_is_measured(check_vma):
    init, update = train_step(pmean(track_error=True), WORKERS, check_vma=check_vma, like=LIKE)
    grads = gradients(LIKE, WORKERS)
    _, state = update(grads, init(zeros()))
    # In the first step what was not sent is the residual.
    norm = root_mean_square(grads)
    wanted = root_mean_square(state.memory.worker_rows.residual) / norm
    assert 0.1 < wanted < 1.0
    np.testing.assert_allclose(fg.metrics(state)["error"], wanted, rtol=1e-5)
    bad = {**grads, "b": grads["b"].at[2, 3].set(jnp.inf)}
    _, after = update(bad, state)
    assert float(after.error) == float(state.error)


def test_an_empty_leaf_has_no_error():
    like = {**LIKE, "empty": jax.ShapeDtypeStruct((0, 3), "float32")}
    init, update = train_step(pmean(track_error=True), WORKERS, like=like)
    start = init({**zeros(), "empty": jnp.zeros((0, 3))})
    _, state = update(gradients(like, WORKERS), start)
    assert 0.0 < float(state.error) < 1.0
    _, state = update(jax.tree.map(jnp.zeros_like, gradients(like, WORKERS)), start)
    assert float(state.error) == 0.0


def test_measuring_costs_twelve_bytes_and_changes_no_bit():
    grads, found, means = gradients(LIKE, WORKERS), [], []
    for measure in (False, True):
        init, update = train_step(pmean(track_error=measure), WORKERS, like=LIKE)
        state = init(zeros())
        means.append(update(grads, state)[0])
        found.append(sum(c.bytes for c in fg.audit(update.lower(grads, state).compile())))
    assert found[0] == fg.wire_bytes(SPARSE, LIKE)
    assert found[1] == found[0] + 12
    assert jax.tree.all(jax.tree.map(np.array_equal, *means))
    counts = {"step", "skipped", "overflow"}
    assert fg.metrics(pmean().init(zeros())).keys() == counts | {"residual"}


def test_bytes_are_those_of_the_program():
    bucketing = fg.Bucketing("leaf")
    tx = pmean(bucketing=bucketing)
    found = fg.metrics(tx.init(zeros()), exchange=SPARSE, params=LIKE, bucketing=bucketing)
    assert found["bytes"] == fg.wire_bytes(SPARSE, LIKE, bucketing)
    with pytest.raises(ValueError, match=r"\.at\("):
        fg.metrics(
            tx.init(zeros()), exchange=fg.Scheduled({0: fg.AllReduce(), 5: SPARSE}), params=LIKE
        )


FRAGMENTED = {"fragments": 4, "overlap_steps": 1, "mixing": 0.5}
MEETINGS = {
    "whole": (fg.optimizers.diloco, {}),
    "fragments": (fg.optimizers.diloco, FRAGMENTED),
    "always one": (fg.optimizers.diloco, {"fragments": 8}),
}


@pytest.mark.parametrize(("make", "options"), MEETINGS.values(), ids=MEETINGS)
def test_bytes_are_those_of_a_meeting(make, options):
    """Against the compiled program, in which the meeting is the only collective of its size."""
    tx = make(optax.sgd(0.1), optax.sgd(0.7), 8, SPARSE, axis_name=AXIS, **options)
    state = fg.init_state(tx, zeros(), mesh_of(WORKERS), AXIS)
    part = fg.optimizers.fragment(LIKE, options.get("fragments", 1))
    found = fg.metrics(state, exchange=SPARSE, params=part)
    specs = fg.state_specs(state, AXIS)

    def step(rows, state):
        own = jax.tree.map(lambda r: r[0], rows)
        return tx.update(own, state, own)[1]

    run = jax.shard_map(
        step, mesh=mesh_of(WORKERS), in_specs=(P(AXIS), specs), out_specs=specs, check_vma=False
    )
    audited = fg.audit(jax.jit(run).lower(gradients(LIKE, WORKERS), state).compile())
    assert found["bytes"] == sum(c.bytes for c in audited)


@pytest.mark.parametrize("fragments", [1, 2])
def test_states_whose_tuples_have_become_dicts_are_read_alike(fragments):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(10, 11, rngs=nnx.Rngs(0))
    if fragments == 1:
        tx = optax.chain(
            pmean(fg.TwoStage(fg.Sign(), workers=4), track_error=True), optax.adam(0.1)
        )
    else:
        tx = fg.optimizers.diloco(optax.adam(0.1), optax.sgd(0.7), 4, fragments=2)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    plain = jax.tree.map(lambda a: a + 1, tx.init(params))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    as_dicts = nnx.state((model, optimizer))
    filled = jax.tree.map(lambda a: a + 1, nnx.state(optimizer))
    options = {"exchange": fg.AllReduce(), "params": params}
    for state in (filled, nnx.to_pure_dict(filled)):
        found, expected = fg.metrics(state, **options), fg.metrics(plain, **options)
        assert list(expected) == [key.removeprefix("opt_state/") for key in found]
        for (name, value), other in zip(found.items(), expected.values(), strict=True):
            np.testing.assert_allclose(value, other, err_msg=name)
    assert "step" in {key.rpartition("/")[2] for key in fg.metrics(as_dicts)}
