"""Dion: directions, what is no matrix, bad steps, and its state through all that a state goes."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import gradients, values
from jax.sharding import AxisType
from parallel import AXIS, mesh_of, train_step
from stepwise import run, stacked

import fftgrad as fg

WORKERS = 4
LIKE = {
    "conv": jax.ShapeDtypeStruct((3, 3, 4, 8), "float32"),
    "embed": jax.ShapeDtypeStruct((40, 12), "float32"),
    "wide": jax.ShapeDtypeStruct((12, 40), "float32"),
    "bias": jax.ShapeDtypeStruct((7,), "float32"),
}
RANK = 2
DION = fg.methods.scale_by_dion(rank=RANK, dense=("embed",))


def zeros(like=LIKE):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def grads(*seeds, like=LIKE):
    """Of all workers, a step for each seed."""
    return stacked([gradients(like, WORKERS, seed) for seed in seeds])


@pytest.mark.parametrize("scale", [2.0**70, 2.0**-70])
def test_gradients_whose_squares_no_float_holds_give_the_same_directions(scale):
    scaled = jax.tree.map(lambda g: np.float32(scale) * g, grads(0, 1, 2))
    (one, _), (other, _) = (run(DION, rows) for rows in (grads(0, 1, 2), scaled))
    np.testing.assert_allclose(other["wide"], one["wide"], rtol=1e-4, atol=1e-4)


def test_what_is_named_and_what_is_no_matrix_goes_through_the_others():
    tx = fg.methods.scale_by_dion(rank=RANK, others=optax.trace(0.5), dense=("embed",))
    updates, _ = run(tx, grads(0, 1))
    for name in ("embed", "bias"):
        first, second = grads(0, 1)[name].mean(1)
        np.testing.assert_allclose(updates[name][1, 0], second + 0.5 * first, rtol=1e-5, atol=1e-5)


def test_without_a_gradient_nothing_moves_and_the_next_one_is_found():
    late = jax.tree.map(lambda g: np.stack([0 * g[0], *g[1:]]), grads(0, 0, 0))
    (first, _), (found, _) = (run(DION, rows) for rows in (grads(0, 0, 0), late))
    assert not any(np.any(leaf[0]) for leaf in found.values())
    for name in ("conv", "wide"):
        np.testing.assert_allclose(found[name][1], first[name][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LIKE)
def test_a_bad_step_gives_no_update_and_leaves_no_trace(name):
    spoiled = grads(0, 1, 1)
    spoiled[name][(1, 2, *(side // 2 for side in LIKE[name].shape))] = np.inf
    (expected, _), (found, states) = (run(DION, rows) for rows in (grads(0, 1, 1), spoiled))
    assert all(np.all(np.isnan(leaf[1])) for leaf in found.values())
    assert np.all(states.pmean.skipped[-1] == 1)
    kept = (states.pmean.memory, states.pmean.exchange, states.others)
    for before, after, _ in jax.tree.leaves(kept):
        assert before.tobytes() == after.tobytes()
    for leaf, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert leaf[2].tobytes() == wanted[1].tobytes()


def test_narrow_parameters_have_a_wide_state():
    """What rounding drops of a direction goes nowhere: it would be no gradient."""
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "bfloat16"), LIKE)
    rows = grads(0, 1, 2, like=narrow)
    updates, states = run(DION, rows)
    expected, wide = run(DION, jax.tree.map(lambda g: g.astype("float32"), rows))
    for name in LIKE:
        assert updates[name].dtype == "bfloat16"
        np.testing.assert_array_equal(updates[name], expected[name].astype("bfloat16"))
    assert bits(states) == bits(wide)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(states)} == {"float32", "int32"}


# Its state


def momenta(state):
    residual = state.pmean.memory.worker_rows.residual
    return {name: np.asarray(residual[name], np.float64) for name in ("conv", "wide")}


@pytest.mark.parametrize("workers", [3, 6])
def test_another_number_of_workers_goes_on_with_the_mean_of_the_momenta(workers):
    init, update = train_step(DION, WORKERS, like=LIKE)
    _, state = update(gradients(LIKE, WORKERS), init(zeros()))
    fresh = fg.init_state(DION, zeros(), mesh_of(workers), AXIS)
    resharded = fg.checkpoint.reshard_state(state, fresh).state
    for name, rows in momenta(resharded).items():
        assert len(rows) == workers
        np.testing.assert_allclose(rows.mean(0), momenta(state)[name].mean(0), atol=1e-5)
    assert bits(resharded.others) == bits(state.others)
    assert bits(resharded.pmean.exchange) == bits(state.pmean.exchange)
    _, update = train_step(DION, workers, like=LIKE)
    updates, _ = update(gradients(LIKE, workers), resharded)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(updates))


def test_directions_are_those_of_the_transpose_where_the_mean_has_two_large_ones():
    """The authors' weight is the transpose of a kernel, and their P is on its other side.

    Both find the same directions once the iteration has converged, which it does on a momentum
    of two directions.
    """
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 2)))[0] for n in (12, 40))
    kernel = (left * [3.0, 1.0]) @ right.T
    rows = {"w": np.tile(kernel.astype(np.float32), (30, WORKERS, 1, 1))}
    found, _ = run(fg.methods.scale_by_dion(rank=2), rows)
    m, q = np.zeros((40, 12)), values((12, 2)).astype(np.float64)
    for _ in range(30):  # as the authors': (out, in)
        m = m + kernel.T
        p, _ = np.linalg.qr(m @ q)
        r = m.T @ p
        m = m - 0.05 * p @ r.T
        q = r / np.linalg.norm(r, axis=0)
    np.testing.assert_allclose(found["w"][-1, 0], np.sqrt(40 / 12) * (p @ q.T).T, atol=1e-3)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "method",
    [
        fg.methods.scale_by_dion(rank=2),
        fg.compressed_pmean(fg.methods.acp_sgd(rank=2), axis_name=AXIS),
    ],
    ids=["scale_by_dion", "acp_sgd"],
)
def test_a_shard_of_a_parameter_is_a_matrix_on_its_own(method, check_vma):
    mesh = jax.make_mesh((WORKERS, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    params, split = {"w": np.zeros((24, 40), np.float32)}, {"w": jax.P(None, "model")}
    specs = fg.state_specs(jax.eval_shape(method.init, params), AXIS, split)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def step(rows, state):
        return method.update(jax.tree.map(lambda g: g[0], rows), state)

    rows = {"w": jax.P(AXIS, None, "model")}
    update = jax.jit(wrap(step, in_specs=(rows, specs), out_specs=(split, specs)))
    half = {"w": jax.ShapeDtypeStruct((24, 20), "float32")}
    init, alone = train_step(method, WORKERS, like=half)
    state, halves = fg.init_state(method, params, mesh, AXIS, split), [init(zeros(half))] * 2
    for seed in range(3):
        given = values((WORKERS, 24, 40), seed)
        whole, state = update({"w": given}, state)
        for i in range(2):
            found, halves[i] = alone({"w": given[..., 20 * i : 20 * i + 20]}, halves[i])
            np.testing.assert_allclose(
                whole["w"][:, 20 * i : 20 * i + 20], found["w"], rtol=1e-4, atol=1e-4
            )
