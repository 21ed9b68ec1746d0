"""Learned codes: the oracle, the phases, what travels, and what is kept."""

import jax
import numpy as np
import pytest
import reference_learned as oracle
from cases import gradients, sample, values
from jax.sharding import PartitionSpec as P
from parallel import AXIS, everywhere, train_step, with_model

import fftgrad as fg
from fftgrad.contrib import _autoencoder as _training
from fftgrad.contrib import learned
from fftgrad.exchanges._parts import DenseByName

WORKERS, UNTIL = 4, 3
NET = learned.Autoencoder(encoder=(3, 2), code=2, decoder=(2, 3), seed=2)
LIKE = {
    "head": jax.ShapeDtypeStruct((9,), "float32"),
    "in": jax.ShapeDtypeStruct((20, 6), "float32"),
    "out": jax.ShapeDtypeStruct((150,), "float32"),
}
ZEROS = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), LIKE)
VARIANTS = ("leader", "all_reduce")


def exchange(variant, until=UNTIL, dense=("head",), **options):
    options = {"innovation": 0.01, "rate": 0.3, "autoencoder": NET, **options}
    return learned.LearnedCodes(
        DenseByName(dense, fg.TopK(fraction=0.1)), until, variant, **options
    )


def pmean(variant, **options):
    return fg.compressed_pmean(exchange(variant, **options), fg.ErrorFeedback(), axis_name=AXIS)


def as_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


# The oracle


@pytest.mark.parametrize("variant", VARIANTS)
def test_six_steps_on_four_workers_are_those_of_the_equations(variant):
    """And each phase sends the bytes that it says."""
    init, update = train_step(pmean(variant), WORKERS, like=LIKE)
    state = init(ZEROS)
    update = update.lower(gradients(LIKE, WORKERS), state).compile()
    sends_what_it_says(exchange(variant), update)
    numpy = oracle.LearnedCodes(
        as_float64(jax.jit(NET.init)()), UNTIL, variant == "leader", 0.1, ("head",), 0.01, 0.3
    )
    residuals = [{n: np.zeros(s.shape) for n, s in LIKE.items()} for _ in range(WORKERS)]
    for step in range(2 * UNTIL):
        grads = jax.tree.map(np.asarray, gradients(LIKE, WORKERS, seed=step))
        got, state = update(grads, state)
        rows = [
            {n: np.ravel(grads[n][w] + residuals[w][n]).astype(np.float64) for n in LIKE}
            for w in range(WORKERS)
        ]
        wanted, sent = numpy(rows)
        for w in range(WORKERS):
            residuals[w] = {n: (rows[w][n] - sent[w][n]).reshape(LIKE[n].shape) for n in LIKE}
        for n in LIKE:
            assert close(np.ravel(got[n]), wanted[n]), (step, n)
            held = np.stack([r[n] for r in residuals])
            assert close(state.memory.worker_rows.residual[n], held), (step, n)
        assert np.ravel(state.exchange[0].shared.error)[0] == pytest.approx(numpy.error, rel=1e-4)
        params = jax.tree.leaves(state.exchange[0].shared.autoencoder)
        for a, b in zip(params, jax.tree.leaves(numpy.params), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def close(found, wanted):
    return np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted) + 1e-6


def test_the_default_has_the_layers_of_the_paper():
    net = learned.Autoencoder()
    shapes = [s.shape for s in jax.tree.leaves(jax.eval_shape(net.init)) if len(s.shape) == 3]
    encoder = [(3, 1, 64), (3, 64, 128), (3, 128, 256), (3, 256, 64), (1, 64, 4)]
    decoder = [(3, 4, 32), (3, 32, 64), (3, 64, 128), (3, 128, 32), (1, 33, 1)]
    assert sorted(shapes) == sorted(encoder + decoder)
    assert net.code_shape(100) == (7, 4)


@pytest.mark.parametrize("seed", sample(range(5), lambda seed: {seed > 2}))
def test_with_a_leader_no_worker_is_worse_off_whatever_was_learned(seed):
    net = learned.Autoencoder(encoder=(3, 2), code=2, decoder=(2, 3), seed=seed)
    phase = exchange("leader", until=0, dense=(), autoencoder=net)
    x = values((WORKERS, 150), seed) * np.float32([[1], [1e3], [1e-3], [0]])

    def sent(row):
        comm = fg.exchanges.Comm(AXIS, fg.Step.of(0, seed))
        return row - phase.mean(row, phase.init(row), comm).error

    lost = np.linalg.norm(x - everywhere("vmap", sent, WORKERS)(x), axis=1)
    before = np.linalg.norm(x, axis=1)
    assert np.all(lost <= before * (1 + 1e-6))
    assert lost[3] == 0


# What travels


def sends_what_it_says(whole, program):
    weights = sum(p.size for p in jax.tree.leaves(jax.eval_shape(NET.init)))
    by_branch = {}
    for c in fg.audit(program):
        by_branch.setdefault(c.branch, []).append(c)
    assert set(by_branch) == {(1,), (0,), (0, 0)}
    for branch, step in (((1,), 0), ((0,), UNTIL)):
        said = fg.wire_bytes(whole.at(step), LIKE)
        assert sum(c.bytes for c in by_branch[branch]) == said
        links = sum(c.link_bytes(WORKERS) for c in by_branch[branch])
        assert fg.link_bytes(whole.at(step), LIKE, WORKERS) == pytest.approx(links)
    assert [(c.kind, c.bytes) for c in by_branch[0, 0]] == [("all-reduce", 4 * weights)]
    summed = whole.variant == "all_reduce"
    assert len(by_branch[1,]) == 3
    assert len(by_branch[0,]) == 3 - summed
    for asked in (fg.wire_bytes, lambda *args: fg.link_bytes(*args, WORKERS)):
        with pytest.raises(ValueError, match=r"exchange.at\("):
            asked(whole, LIKE)


def test_a_bucket_of_dense_leaves_alone_is_a_dense_mean():
    phase = exchange("leader", dense=("a", "b"))
    like = {"a": jax.ShapeDtypeStruct((5,), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
    tx = fg.compressed_pmean(phase, axis_name=AXIS)
    grads = gradients(like, WORKERS)
    mean = everywhere("vmap", lambda g: tx.update(g, tx.init(g))[0], WORKERS)(grads)
    for n in like:
        wanted = np.asarray(grads[n]).mean(0)
        np.testing.assert_allclose(np.asarray(mean[n])[0], wanted, rtol=1e-6)
    assert fg.wire_bytes(phase.at(0), like) == 48


# Replicas


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_that_differ_become_those_of_one_worker_before_codes_travel(variant):
    """As a device may add up otherwise in each run."""
    tx = pmean(variant)
    update = everywhere("vmap", lambda g, s: tx.update(g, s), WORKERS)
    state = jax.jit(jax.vmap(tx.init))(jax.tree.map(lambda a: np.stack([a] * WORKERS), ZEROS))
    for step in range(UNTIL):
        _, state = update(gradients(LIKE, WORKERS, seed=step), state)
    (own,) = state.exchange
    shift = np.float32(0.01) * np.arange(WORKERS, dtype=np.float32)
    differ = jax.tree.map(
        lambda p: np.asarray(p) + shift.reshape(WORKERS, *[1] * (p.ndim - 1)),
        own.shared.autoencoder,
    )
    shared = own.shared._replace(autoencoder=differ)
    state = state._replace(exchange=(own._replace(shared=shared),))
    for step in range(UNTIL, UNTIL + 2):
        mean, state = update(gradients(LIKE, WORKERS, seed=step), state)
        for leaf in jax.tree.leaves(mean):
            assert np.asarray(leaf).tobytes() == np.asarray(leaf)[:1].tobytes() * WORKERS
    wanted = jax.tree.map(lambda then: np.stack([then[UNTIL % WORKERS]] * WORKERS), differ)
    jax.tree.map(np.testing.assert_array_equal, state.exchange[0].shared.autoencoder, wanted)


# Learning


@pytest.mark.parametrize("pick", [fg.TopK(k=1), None])
def test_what_is_not_finite_moves_nothing_and_a_worker_without_values_teaches_nothing(pick):
    params, rows = jax.jit(NET.init)(), values((WORKERS, 30))
    learn = jax.jit(lambda rows: _training.learn(NET, params, rows, 1, pick, 0.1))
    for bad in (np.nan, np.inf, 3e38):
        spoiled = rows.copy()
        spoiled[1, 7] = bad
        found = jax.device_get(learn(spoiled)[0])
        assert all(np.all(np.isfinite(p)) for p in jax.tree.leaves(found))
        if not bad < 1e39:
            jax.tree.map(np.testing.assert_array_equal, found, params)
    three, four = learn(rows[:3]), learn(np.where(np.arange(WORKERS)[:, None] == 3, 0, rows))
    for a, b in zip(jax.tree.leaves(three), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# State


@pytest.mark.full
def test_each_shard_of_a_model_has_an_autoencoder_of_its_own():
    mesh = with_model()
    specs = {"w": P("model")}
    tx = pmean("leader", until=1, dense=())
    params = {"w": np.zeros((80, 3), np.float32)}
    state = fg.init_state(tx, params, mesh, AXIS, specs)
    state_specs = fg.state_specs(state, AXIS, specs)

    def update(grads, state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    run = jax.jit(
        jax.shard_map(
            update,
            mesh=mesh,
            in_specs=({"w": P(AXIS, "model")}, state_specs),
            out_specs=(specs, state_specs),
        )
    )
    for step in range(3):
        mean, state = run({"w": values((4, 80, 3), step)}, state)
        assert np.all(np.isfinite(np.asarray(mean["w"])))
    (own,) = state.exchange
    first, second = np.split(np.asarray(own.shared.autoencoder["encoder"]["Conv_0"]["kernel"]), 2)
    assert not np.array_equal(first, second)
    assert own.shared.error.shape == (2,)


# Mistakes


def test_mistakes_are_answered_with_the_remedy():
    codes, rule, like = learned.LearnedCodes, fg.Threshold(fraction=0.1), LIKE["out"]
    for codec, remedy in ((fg.Fft(), "must be a selector"), (rule, "use TopK or ChunkTopK")):
        with pytest.raises(ValueError, match=remedy):
            jax.eval_shape(codes(codec, 3).init, like)
