"""Plans of workers that fast links join in groups, and the names of their axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fftgrad as fg
from fftgrad import planning
from fftgrad.planning import _candidates

LIKE = {
    "w": jax.ShapeDtypeStruct((400, 500), "float32"),
    "b": jax.ShapeDtypeStruct((40,), "float32"),
}
FAST = (2, fg.planning.Link("50GB/s", "10us"))


def none(rows):
    """As if no row took anything here."""
    return {row.name: fg.planning.Timing(0.0, 0.0) for row in rows}


def by_name(found):
    return {row.name: row for row in found.rows}


def test_each_of_two_levels_is_on_its_links():
    rng = np.random.default_rng(0)
    gradient = {k: rng.standard_t(3, v.shape).astype(np.float32) for k, v in LIKE.items()}
    exact = fg.Hierarchical("fast", 2, slow=fg.AllReduce(), memory=fg.NoMemory())
    few = fg.Hierarchical("fast", 2, slow=fg.AllGather(fg.TopK(0.1)))
    rows = [fg.planning.Candidate("dense", exact, dense=True), fg.planning.Candidate("top-k", few)]
    found = by_name(
        fg.planning.plan(
            LIKE, step=0.0, link=fg.planning.Link(1e6, 0.0), workers=8,
            fast=(2, fg.planning.Link(2e6, 0.0)),
            rows=rows, timings=none(rows), buckets=1, gradients=[gradient],
        )
    )  # fmt: skip
    dense, size = found["dense"], 4 * 200_040
    assert dense.link_bytes == fg.link_bytes(exact, LIKE, 8)
    assert dense.wire_bytes == size / 2  # of which each of a pair carries its own
    # Half goes to the other one of the pair, and the mean of the other half comes back.
    slow, fast = size / 2 * 1.5 / 1e6, (size / 2 + size / 2) / 2e6
    assert dense.parts.exchange == pytest.approx(slow + fast, rel=1e-3)
    assert dense.error == 0
    assert 0.3 < found["top-k"].error < 0.95


def test_over_fast_links_the_memory_is_that_of_the_group():
    alone = {row.name: row for row in _candidates.candidates(LIKE, 4)}
    for row in _candidates.candidates(LIKE, 4, 2):
        own = row.recipe.exchange
        assert row.recipe == fg.Recipe(own)
        assert fg.Recipe(own.slow, own.memory) == alone[row.name].recipe


def planned(**options):
    some = ("dense float32", "QSGD 4 bits", "4 local steps, signs")
    axis = options.get("axis_name", ("slow", "fast"))[-1]
    usual = _candidates.candidates(LIKE, 4, 2, axis) if "fast" in options else (
        _candidates.candidates(LIKE, 4)
    )  # fmt: skip
    rows = [row for row in usual if row.name in some]
    known = {"step": "1ms", "link": "1gbit", "workers": 8 if "fast" in options else 4}
    return by_name(
        fg.planning.plan(LIKE, rows=rows, timings=none(rows), buckets=1, **known, **options)
    )


def test_the_code_has_the_axis_that_is_asked_for():
    for axis in ("replica", ("node", "gpu")):
        for row in planned(axis_name=axis).values():
            assert row.code.endswith(f", axis_name={axis!r})")
    assert planned()["dense float32"].code.endswith(", axis_name='data')")


def test_the_axes_of_two_levels_may_have_other_names():
    usual, named = planned(fast=FAST), planned(fast=FAST, axis_name=("node", "gpu"))
    for name, row in named.items():
        code = row.code.replace("'gpu'", "'fast'").replace("'node'", "'slow'")
        assert "'gpu'" in row.code
        assert row._replace(code=code) == usual[name]


def test_local_steps_over_two_levels_meet():
    """As printed: each worker on its own, and after four steps all the same."""
    code = planned(fast=FAST)["4 local steps, signs"].code
    tx = eval(code, {"fg": fg, "optax": optax, "optimizer": optax.sgd(0.1)})
    like = {"w": jnp.ones(300)}
    grads = jax.random.normal(jax.random.key(0), (4, 4, 2, 300))

    def train(gradient):
        params, state, seen = like, tx.init(like), []
        for turn in range(4):
            updates, state = tx.update({"w": gradient[turn]}, state, params)
            params = optax.apply_updates(params, updates)
            seen.append(params["w"])
        return jnp.stack(seen)

    inner = jax.vmap(train, axis_name="fast", in_axes=1, out_axes=1)
    seen = jax.jit(jax.vmap(inner, axis_name="slow", in_axes=1, out_axes=1))(grads)
    rows = np.asarray(seen).reshape(4, 8, 300)
    assert np.all(np.isfinite(rows))
    assert len(np.unique(rows[2], axis=0)) == 8
    assert len(np.unique(rows[3], axis=0)) == 1
    assert np.any(rows[3][0] != 1)


def test_what_is_measured_of_two_levels_makes_a_plan_of_them():
    rows = [row for row in _candidates.candidates(LIKE, 4, 2) if row.dense]
    found = fg.planning.measure(
        LIKE, step=0.1, link="1gbit", workers=8, fast=FAST, rows=rows, seconds=0.01
    )
    assert (found.workers, found.fast, found.axis_name) == (8, FAST, ("slow", "fast"))
    assert {timing.workers for timing in found.timings.values()} == {(4, 2)}
    plan = fg.planning.plan(LIKE, **found._asdict(), rows=rows)
    assert "axis_name=('slow', 'fast')" in plan.best.code


def test_all_that_is_compared_of_two_levels_is_hierarchical():
    rows = _candidates.candidates(LIKE, 4, 2)
    assert all(isinstance(row.recipe.exchange, fg.Hierarchical) for row in rows)
    names = {row.name for row in rows}
    assert {"4 local steps, signs", "8 local steps, signs"} <= names
    assert not [name for name in names if "rank" in name]
    with pytest.raises(ValueError, match="measure with the same"):
        fg.planning.plan(LIKE, step=0.1, link="1gbit", workers=8, fast=FAST, timings={})


def test_the_usual_rows_are_made_for_the_workers_and_their_axes(monkeypatch):
    seen = []
    monkeypatch.setattr(
        planning._measure, "_time_rows", lambda asked, *_: seen.extend(asked.rows) or {}
    )
    known = {"step": 0.1, "link": "1gbit", "workers": 8}
    fg.planning.measure(LIKE, fast=FAST, axis_name=("node", "gpu"), **known)
    assert tuple(seen) == _candidates.candidates(LIKE, 4, 2, "gpu")
    seen.clear()
    fg.planning.measure(LIKE, **known)
    assert tuple(seen) == _candidates.candidates(LIKE, 8)
