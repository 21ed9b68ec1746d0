"""Dion: directions, what is no matrix, bad steps, and its state through all that a state goes."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import gradients, values
from jax.sharding import AxisType
from parallel import AXIS, mesh_of, train_step

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


@functools.cache
def compiled(tx=DION):
    """`init` and `update` for `LIKE`."""
    return train_step(tx, WORKERS, like=LIKE)


def run(tx=DION, steps=3, scale=1.0):
    """The updates of some steps, and the state after them."""
    init, update = compiled(tx)
    state, out = init(zeros()), []
    for seed in range(steps):
        grads = jax.tree.map(lambda g: np.float32(scale) * g, gradients(LIKE, WORKERS, seed))
        updates, state = update(grads, state)
        out.append(updates)
    return out, state


def test_an_update_has_columns_of_one_length_whatever_that_of_the_gradient():
    """||√(out / in) P Qᵀ||² is the rank times out / in, and the last axis is out."""
    for update in run()[0]:
        for name, fan_in, fan_out in (("conv", 36, 8), ("wide", 12, 40)):
            matrix = np.asarray(update[name], np.float64).reshape(fan_in, fan_out)
            np.testing.assert_allclose(np.sum(matrix**2), RANK * fan_out / fan_in, rtol=1e-5)
            assert np.linalg.matrix_rank(matrix, rtol=1e-4) == RANK


@pytest.mark.parametrize("scale", [2.0**70, 2.0**-70])
def test_gradients_whose_squares_no_float_holds_give_the_same_directions(scale):
    plain, _ = run()
    scaled, _ = run(scale=scale)
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(other["wide"], one["wide"], rtol=1e-4, atol=1e-4)


def test_what_is_named_and_what_is_no_matrix_goes_through_the_others():
    tx = fg.methods.scale_by_dion(rank=RANK, others=optax.trace(0.5), dense=("embed",))
    (_, update), _ = run(tx, 2)
    means = [jax.tree.map(lambda g: g.mean(0), gradients(LIKE, WORKERS, seed)) for seed in (0, 1)]
    for name in ("embed", "bias"):
        wanted = means[1][name] + 0.5 * means[0][name]
        np.testing.assert_allclose(update[name], wanted, rtol=1e-5, atol=1e-5)


def test_without_a_gradient_nothing_moves_and_the_next_one_is_found():
    init, update = compiled()
    state = init(zeros())
    still, state = update(jax.tree.map(np.zeros_like, gradients(LIKE, WORKERS)), state)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(still))
    again, _ = update(gradients(LIKE, WORKERS), state)
    first, _ = update(gradients(LIKE, WORKERS), init(zeros()))
    for name in ("conv", "wide"):
        np.testing.assert_allclose(again[name], first[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LIKE)
def test_a_bad_step_gives_no_update_and_leaves_no_trace(name):
    init, update = compiled()
    _, state = update(gradients(LIKE, WORKERS), init(zeros()))
    grads = gradients(LIKE, WORKERS, seed=1)
    spoiled = np.array(grads[name])
    spoiled[(2, *(side // 2 for side in LIKE[name].shape))] = np.inf
    updates, after = update({**grads, name: spoiled}, state)
    assert all(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves(updates))
    assert int(after.pmean.skipped) == 1
    kept = ("memory", "exchange")
    for one, other in [
        *((getattr(state.pmean, field), getattr(after.pmean, field)) for field in kept),
        (state.others, after.others),
    ]:
        assert bits(one) == bits(other)
    expected, _ = update(grads, state)
    got, _ = update(grads, after)
    assert bits(got) == bits(expected)


def test_narrow_parameters_have_a_wide_state():
    """What rounding drops of a direction goes nowhere: it would be no gradient."""
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "bfloat16"), LIKE)
    init, update = train_step(DION, WORKERS, like=narrow)
    wide_init, wide_update = compiled()
    state, wide = init(zeros(narrow)), wide_init(zeros())
    for seed in range(3):
        grads = gradients(narrow, WORKERS, seed)
        updates, state = update(grads, state)
        expected, wide = wide_update(jax.tree.map(lambda g: g.astype("float32"), grads), wide)
        for name in LIKE:
            assert updates[name].dtype == "bfloat16"
            np.testing.assert_array_equal(updates[name], expected[name].astype("bfloat16"))
    assert bits(state) == bits(wide)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


# Its state


def momenta(state):
    residual = state.pmean.memory.worker_rows.residual
    return {name: np.asarray(residual[name], np.float64) for name in ("conv", "wide")}


@pytest.mark.parametrize("workers", [3, 6])
def test_another_number_of_workers_goes_on_with_the_mean_of_the_momenta(workers):
    _, state = run()
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
    grads = {"w": np.stack([kernel.astype(np.float32)] * WORKERS)}
    like = {"w": jax.ShapeDtypeStruct((12, 40), "float32")}
    init, update = train_step(fg.methods.scale_by_dion(rank=2), WORKERS, like=like)
    state = init(zeros(like))
    for _ in range(30):
        found, state = update(grads, state)
    m, q = np.zeros((40, 12)), values((12, 2)).astype(np.float64)
    for _ in range(30):  # as the authors': (out, in)
        m = m + kernel.T
        p, _ = np.linalg.qr(m @ q)
        r = m.T @ p
        m = m - 0.05 * p @ r.T
        q = r / np.linalg.norm(r, axis=0)
    np.testing.assert_allclose(found["w"], np.sqrt(40 / 12) * (p @ q.T).T, atol=1e-3)


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
        grads = values((WORKERS, 24, 40), seed)
        whole, state = update({"w": grads}, state)
        for i in range(2):
            found, halves[i] = alone({"w": grads[..., 20 * i : 20 * i + 20]}, halves[i])
            np.testing.assert_allclose(
                whole["w"][:, 20 * i : 20 * i + 20], found["w"], rtol=1e-4, atol=1e-4
            )
