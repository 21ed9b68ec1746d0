"""`AcpSgd`: one sum of the same size in every step, and a turn that only a good step takes."""

import itertools

import jax
import numpy as np
import pytest
from cases import gradients, values
from parallel import AXIS, train_step
from stepwise import run

import fftgrad as fg

WORKERS = 4
MODEL = {
    "square": jax.ShapeDtypeStruct((32, 32), "float32"),
    "wide": jax.ShapeDtypeStruct((12, 48), "float32"),
    "wider": jax.ShapeDtypeStruct((16, 40), "float32"),
    "conv": jax.ShapeDtypeStruct((3, 3, 4, 8), "float32"),
    "tall": jax.ShapeDtypeStruct((40, 10), "float32"),
    "bias": jax.ShapeDtypeStruct((10,), "float32"),
}
LEAF = fg.Bucketing("leaf")


def zeros(like):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), like)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# Bytes


def test_one_program_has_one_sum_outside_of_the_condition():
    init, update = train_step(
        fg.compressed_pmean(fg.methods.acp_sgd(rank=2), axis_name=AXIS), WORKERS, like=MODEL
    )
    args = gradients(MODEL, WORKERS), jax.eval_shape(init, zeros(MODEL))
    compiled = update.lower(*args).compile()
    (found,) = fg.audit(compiled)
    assert (found.kind, found.branch) == ("all-reduce", ())
    assert found.bytes == fg.wire_bytes(fg.AcpSgd(2), MODEL)
    assert "conditional(" in compiled.as_text()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_sends_about_half_of_what_two_sums_do(rank):
    ours, theirs = (fg.wire_bytes(kind(rank), MODEL, LEAF) for kind in (fg.AcpSgd, fg.PowerSgd))
    assert ours <= 0.55 * theirs
    assert fg.link_bytes(fg.AcpSgd(rank), MODEL, 8, LEAF) == 2 * 7 / 8 * ours


@pytest.mark.parametrize("seed", range(5))
def test_the_two_kinds_of_steps_are_balanced(seed):
    """No choice of who goes first would save more than a twentieth."""
    shapes = np.random.default_rng(seed).integers(8, 200, (9, 2)).tolist()
    like = [jax.ShapeDtypeStruct(tuple(shape), "float32") for shape in shapes]
    best = min(
        max(
            sum(shape[first] for shape, first in zip(shapes, order, strict=True)),
            sum(shape[1 - first] for shape, first in zip(shapes, order, strict=True)),
        )
        for order in itertools.product((0, 1), repeat=len(shapes))
    )
    assert 4 * best <= fg.wire_bytes(fg.AcpSgd(1), like, LEAF) <= 1.05 * 4 * best


# Turns

LIKE = {"w": jax.ShapeDtypeStruct((12, 10), "float32"), "b": jax.ShapeDtypeStruct((8,), "float32")}


def test_bad_steps_are_no_turns():
    """With every other step bad a count of steps would let the same factor travel forever."""
    init, update = train_step(
        fg.compressed_pmean(fg.methods.acp_sgd(rank=2), axis_name=AXIS), WORKERS, like=LIKE
    )
    plain = state = init(zeros(LIKE))
    for seed in range(6):
        grads = gradients(LIKE, WORKERS, seed)
        expected, plain = update(grads, plain)
        got, state = update(grads, state)
        assert bits(got) == bits(expected)
        bad = {**grads, "w": grads["w"].copy()}
        bad["w"][seed % WORKERS, seed, 3] = [np.nan, np.inf][seed % 2]
        mean, after = update(bad, state)
        assert not np.all(np.isfinite(mean["w"]))
        assert bits((after.exchange, after.memory)) == bits((state.exchange, state.memory))
        state = after
    assert int(state.skipped) == 6


# Values


def means_of(exchange, rows, scales):
    """The means of steps on multiples of the same matrices."""
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    return run(tx, np.stack([np.float32(scale) * rows for scale in scales]))[0][:, 0]


@pytest.mark.parametrize("shape", [(16, 10), (10, 16), (3, 4, 10)])
def test_it_finds_the_largest_directions_of_the_mean(shape):
    own = values((WORKERS, *shape)).reshape(WORKERS, -1, shape[-1])
    u, s, vt = np.linalg.svd(own.mean(0), full_matrices=False)
    own += (u[:, :2] * s[0]) @ vt[:2]  # or the third would be nearly as large as the second
    rows, exact = own.reshape(WORKERS, *shape), own.mean(0, dtype=np.float64)
    u, s, vt = np.linalg.svd(exact)
    best = (u[:, :2] * s[:2]) @ vt[:2]
    last = means_of(fg.AcpSgd(rank=2), rows, [1.0] * 20)[-1]
    np.testing.assert_allclose(last.reshape(exact.shape), best, atol=1e-2 * s[0])


@pytest.mark.parametrize("kind", [fg.AcpSgd, fg.PowerSgd])
def test_steps_without_a_gradient_end_nothing(kind):
    """A factor of zeros would make a basis of first rows, or columns, which have no gradient."""
    r = np.random.default_rng(0)
    whole = (r.normal(size=(16, 2)) @ r.normal(size=(2, 10))).astype(np.float32)
    whole[:3] = 0
    whole[:, :3] = 0
    rows, scales = np.stack([whole] * WORKERS), [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    means = means_of(kind(rank=2), rows, scales)
    for scale, mean in zip(scales[4:], means[4:], strict=True):
        np.testing.assert_allclose(mean, scale * whole, atol=1e-4)
    assert not np.any(means[:3])


@pytest.mark.parametrize(
    ("exchange", "least", "most"), [(fg.AcpSgd(2), 0.7, 1.3), (fg.PowerSgd(2), 3.8, 4.1)]
)
def test_what_differs_between_the_workers_is_sent_too(exchange, least, most):
    """Each takes its own product from its residual; with `PowerSgd` the differences add up."""
    tx = fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS)
    _, states = run(tx, np.stack([values((WORKERS, 12, 15))] * 320))
    early, late = (np.linalg.norm(states.memory.worker_rows.residual[at]) for at in (79, -1))
    assert least <= late / early <= most
