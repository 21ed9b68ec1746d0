"""Another exchange in the eigenbasis of earlier means: its basis, its gain, its bytes."""

import jax
import numpy as np
import pytest
from parallel import AXIS
from stepwise import run

import fftgrad as fg

WORKERS, ROWS, COLUMNS = 4, 12, 20
LIKE = jax.ShapeDtypeStruct((ROWS, COLUMNS), "float32")
LOW = fg.AllGather(fg.TopK(k=24))


def hidden(steps, workers=WORKERS, seed=0):
    """Gradients that are sparse in a basis that nobody told, with noise of each worker."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (ROWS, COLUMNS))
    sizes = 3.0 ** -np.arange(ROWS)
    means = [
        left @ (sizes[:, None] * rng.standard_normal((ROWS, 1)) * np.eye(ROWS, COLUMNS)) @ right.T
        for _ in range(steps)
    ]
    noise = 1e-3 * rng.standard_normal((steps, workers, ROWS, COLUMNS))
    return (np.stack(means)[:, None] + noise).astype(np.float32)


def test_what_is_sparse_in_a_hidden_basis_loses_less():
    rows, errors = hidden(40), []
    exact = rows.mean(1)
    for exchange in (LOW, fg.Eigenbasis(LOW, every=4)):
        means, _ = run(fg.compressed_pmean(exchange, fg.NoMemory(), axis_name=AXIS), rows)
        lost = np.linalg.norm(means[:, 0] - exact, axis=(1, 2))
        errors.append(lost / np.linalg.norm(exact, axis=(1, 2)))
    plain, turned = errors
    assert plain[20:].mean() > 0.3
    assert turned[20:].mean() < plain[20:].mean() / 3
    # Before anything was learned it is the exchange itself.
    assert turned[0] == pytest.approx(plain[0], rel=1e-5)


def test_it_sends_what_the_exchange_sends_for_one_vector():
    like = {"w": LIKE, "b": jax.ShapeDtypeStruct((7,), "float32")}
    vector = jax.ShapeDtypeStruct((ROWS * COLUMNS + 7,), "float32")
    two = fg.TwoStage(fg.Budget(ratio=8), WORKERS)
    turned = fg.Eigenbasis(two)
    assert fg.wire_bytes(turned, like) == fg.wire_bytes(two, vector)
    assert fg.link_bytes(turned, like, WORKERS) == fg.link_bytes(two, vector, WORKERS)


def test_long_sides_and_vectors_stay():
    like = {
        "wide": jax.ShapeDtypeStruct((4, 9), "float32"),
        "row": jax.ShapeDtypeStruct((1, 4), "float32"),
        "vector": jax.ShapeDtypeStruct((4,), "float32"),
        "scalar": jax.ShapeDtypeStruct((), "float32"),
        "kernel": jax.ShapeDtypeStruct((2, 2, 3), "float32"),
    }
    turned = fg.Eigenbasis(fg.AllReduce(), largest=4)
    state = jax.eval_shape(lambda: turned.init(jax.tree.leaves(like)))
    shapes = [tuple(side.basis.shape if side else () for side in own) for own in state.shared.sides]
    assert dict(zip(("kernel", "row, vector", "scalar", "wide"), shapes, strict=True)) == {
        "kernel": ((1, 4, 4), (1, 3, 3)), "row, vector": ((), ()), "scalar": ((), ()),
        "wide": ((1, 4, 4), ()),
    }  # fmt: skip


def soap(means, decay, every):
    """Covariance, basis and scale of the rows after these means, in float64."""
    covariance, basis, scale = np.zeros((ROWS, ROWS)), np.eye(ROWS), np.ones(ROWS)
    for t, mean in enumerate(means):
        covariance = decay * covariance + (1 - decay) * mean @ mean.T
        if t < every or t % every == 0:
            basis = np.linalg.qr(covariance @ basis)[0]
            variance = np.diag(basis.T @ covariance @ basis)
            scale = np.maximum(variance / variance.mean(), 1e-3) ** 0.25
    return covariance, basis, scale


@pytest.mark.parametrize("rows", [True, False])
def test_the_sides_are_those_of_the_formula(rows):
    shape = (ROWS, 9) if rows else (9, ROWS)
    exchange = fg.Eigenbasis(fg.AllReduce(), decay=0.8, every=3, largest=ROWS)
    drawn = np.random.default_rng(0).standard_normal((3, 8, *shape)).astype(np.float32)
    drawn *= 2.0 ** -np.arange(shape[1], dtype=np.float32)
    # Two of equal shape, whose sides are stacked, and between them another with equal lengths.
    means = {"a": drawn[0], "b": drawn[1].swapaxes(1, 2), "c": drawn[2]}
    each = jax.tree.map(lambda rows: rows[:, None], means)
    found, states = run(fg.compressed_pmean(exchange, axis_name=AXIS), each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:, 0], b, atol=1e-5), found, means)
    sides = states.exchange[0].shared.sides
    for name, group, row in (("a", 0, 0), ("b", 1, 0), ("c", 0, 1)):
        own = means[name].astype(np.float64)
        left = own.shape[1] == ROWS
        side = sides[group][0 if left else 1]
        covariance, basis, scale = (a[-1, 0, row].astype(np.float64) for a in side)
        like = soap([m if left else m.T for m in own], 0.8, 3)
        np.testing.assert_allclose(covariance, like[0], rtol=1e-4, atol=1e-6)
        # The last columns belong to variances that rounding hides.
        np.testing.assert_allclose(np.abs(basis.T @ like[1])[:4, :4], np.eye(4), atol=1e-2)
        np.testing.assert_allclose(scale[:4], like[2][:4], rtol=1e-2)


def test_what_was_learned_survives_a_spike_whose_square_is_not_finite():
    rows = hidden(12)
    rows[5] *= 1e20
    tx = fg.compressed_pmean(fg.Eigenbasis(LOW, every=2), fg.ErrorFeedback(), axis_name=AXIS)
    _, states = run(tx, rows)
    assert not np.any(states.skipped)
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(states.exchange[0].shared))


def test_a_late_start_has_early_bases_too_and_the_inside_keeps_its_state():
    inside = fg.AllGather(fg.Threshold(fraction=0.2, reuse=3))
    exchange = fg.Scheduled({0: fg.AllReduce(), 5: fg.Eigenbasis(inside, every=4)})
    _, states = run(fg.compressed_pmean(exchange, axis_name=AXIS), hidden(8))
    late = states.exchange[0].shared[1]
    assert late.steps[-1, 0] == 3
    assert np.abs(late.sides[0][0].basis[-1, 0, 0] - np.eye(ROWS)).max() > 0.1
    thresholds = [a for a in jax.tree.leaves(states.exchange[0].own) if a.dtype == np.float32]
    assert any(np.any(a[-1] > 0) for a in thresholds)


def test_a_residual_of_the_exchange_itself_would_be_in_an_old_basis():
    exchange = fg.Eigenbasis(fg.Hierarchical("fast", 2, LOW))
    comm = fg.exchanges.Comm(("slow", "fast"), fg.Step.of(0))
    mean = lambda x: exchange.mean(x, exchange.init(x), comm).mean  # noqa: E731
    over = jax.vmap(jax.vmap(mean, axis_name="fast"), axis_name="slow")
    with pytest.raises(ValueError, match="no memory of its own"):
        jax.eval_shape(over, jax.ShapeDtypeStruct((2, 2, 4, 4), np.float32))
