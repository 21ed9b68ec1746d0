"""What plans are given is looked at before anything long begins, and said where it is wrong."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parallel import mesh_of

import fftgrad as fg
from fftgrad.planning import _exchange, _measure, _timing

LIKE = {"w": jax.ShapeDtypeStruct((30, 40), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
ROWS = [
    fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
    fg.planning.Candidate("top-k", fg.Recipe(fg.AllGather(fg.TopK(0.1)), fg.ErrorFeedback())),
]
TIMINGS = {row.name: fg.planning.Timing(0.001, 0.002) for row in ROWS}
KNOWN = {"step": "20ms", "link": "1gbit", "workers": 8, "rows": ROWS}


def plan(**options):
    known = KNOWN | {"timings": TIMINGS, "buckets": 1} | options
    return fg.planning.plan(known.pop("params", LIKE), **known)


def gradient(scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return {k: (scale * rng.standard_t(3, v.shape)).astype(np.float32) for k, v in LIKE.items()}


def error(gradients, **options):
    return {row.name: row.error for row in plan(gradients=gradients, **options).rows}["top-k"]


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch):
    """What is wrong is said before."""

    def never(*_, **__):
        pytest.fail("it began to time")

    monkeypatch.setattr(_exchange, "timing_of", never)
    monkeypatch.setattr(_measure, "measure_link", never)
    return monkeypatch


# Gradients


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e25, 1e30])
def test_an_error_does_not_depend_on_the_scale(scale):
    assert error([gradient(scale)]) == pytest.approx(error([gradient()]), rel=1e-3)


def test_errors_of_several_gradients_are_one_of_all_together():
    both = error([gradient(1e20), gradient(1e20, seed=1)])
    alone = [error([gradient(1e20, seed=seed)]) for seed in (0, 1)]
    assert min(alone) < both < max(alone)
    assert error([gradient(1e20), gradient(1e-20, seed=1)]) == pytest.approx(alone[0])


def test_what_was_captured_is_a_gradient_of_each_step_and_worker(tmp_path):
    trees = [gradient(seed=seed) for seed in range(4)]
    captured = fg.planning.GradientLog(
        {1: dict(enumerate(trees[:2])), 5: dict(enumerate(trees[2:]))}
    )
    fg.planning.save_gradients(tmp_path / "gradients.npz", captured)
    expected = error(trees)
    assert error(captured) == expected
    assert error(fg.planning.load_gradients(tmp_path / "gradients.npz")) == expected


def test_containers_may_differ_where_paths_are_the_same():
    nested = {"layer": {"w": jax.ShapeDtypeStruct((30, 40), "float32")}}
    tree = {"layer/w": gradient()["w"]}
    found = error([tree], params=nested)
    assert found == error([{"layer": {"w": tree["layer/w"]}}], params=nested)


def test_dtypes_may_be_wider_or_narrower():
    expected = error([gradient()])
    wide = {k: v.astype(np.float64) for k, v in gradient().items()}
    assert error([wide]) == expected
    narrow = {k: jnp.asarray(v, jnp.bfloat16) for k, v in gradient().items()}
    assert error([narrow]) == pytest.approx(expected, rel=0.01)


def changed(**leaves):
    return gradient() | leaves


W = gradient()["w"]


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ([{"zzz": np.ones(7)}], ValueError, "gradients of these parameters"),
        ([changed(c=np.ones(3))], ValueError, "one that differs"),
        ([changed(w=W.T)], ValueError, "one that differs"),
        ([gradient(), gradient(0.0)], ValueError, "not all zero"),
        ([gradient(1e-45)], ValueError, "not all zero"),
        ([changed(b=np.full(7, np.nan))], ValueError, "finite in float32"),
        ([changed(b=np.full(7, 1e200))], ValueError, "finite in float32"),
        (gradient(), ValueError, "pass a list"),
        ([W], ValueError, "pass a list"),
    ],
)
def test_gradients_are_like_the_parameters(wrong, kind, said):
    asked = {
        "plan": plan,
        "measure": functools.partial(fg.planning.measure, LIKE, **KNOWN),
        "time_exchange": functools.partial(
            fg.planning.time_exchange, ROWS[0].transformation("data"), LIKE, {"data": 8}
        ),
    }
    for name, ask in asked.items():
        with pytest.raises(kind, match=rf"{name}\(gradients\): .*{said}"):
            ask(gradients=wrong)


def test_what_is_given_is_what_is_timed_with(monkeypatch):
    """In arrays of a device, so that no transfer is in the time."""
    seen = []

    def timing_of(_, __, axes, inputs, seconds, every, agree, *apart):
        seen.append((axes, inputs(), seconds, every, agree, apart))
        return fg.planning.Timing(0.0, 1.0, tuple(axes.values()))

    monkeypatch.setattr(_exchange, "timing_of", timing_of)
    agree = lambda value: value  # noqa: E731 (its identity is looked at)
    monkeypatch.setattr(_timing, "agreement", lambda *_: agree)
    given = [gradient(), gradient(seed=1)]
    fg.planning.measure(LIKE, gradients=given, buckets=2, seconds=0.25, **KNOWN)
    fg.planning.plan(LIKE, gradients=given, buckets=2, seconds=0.25, **KNOWN)
    fg.planning.time_exchange(
        ROWS[1].transformation("data"), LIKE, {"data": 8}, gradients=given, seconds=0.25
    )
    assert len(seen) == 5
    for axes, inputs, seconds, every, *_ in seen:
        assert (dict(axes), seconds, every) == ({"data": 8}, 0.25, 1)
        for tree, own in zip(inputs, given, strict=True):
            assert all(isinstance(leaf, jax.Array) for leaf in tree.values())
            jax.tree.map(np.testing.assert_array_equal, tree, own)
    assert all(rest[4] is agree for rest in seen)
    assert [rest[5] for rest in seen] == [(True,)] * 4 + [()]


# Workers, links and timings


def test_timings_are_of_the_workers_that_are_planned_for():
    fast = (4, fg.planning.Link("50GB/s"))
    flat = {name: timing._replace(workers=(8,)) for name, timing in TIMINGS.items()}
    assert plan(timings=flat).rows == plan().rows
    for options in ({"workers": 64}, {"workers": 8, "fast": fast}):
        with pytest.raises(ValueError, match=r"plan\(timings\['dense'\]\): .*the same workers"):
            plan(timings=flat, **options)
    with pytest.raises(ValueError, match=r"predict_step\(timing\): .*the same workers"):
        fg.planning.predict_step(
            ROWS[0].transformation("data"), LIKE, step=1.0, link="1gbit", axes={"data": 4},
            timing=flat["dense"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("timing", "kind", "said"),
    [
        (fg.planning.Timing(-0.1, 0.0), ValueError, "finite and not negative"),
        (fg.planning.Timing(0.0, math.nan), ValueError, "finite and not negative"),
        (fg.planning.Timing("a", 0.0), ValueError, "with a unit"),
        ((0.1, 0.2), TypeError, r"fg.planning.Timing\(compress="),
    ],
)
def test_timings_are_timings(timing, kind, said):
    with pytest.raises(kind, match=rf"plan\(timings\['top-k'\]\): .*{said}"):
        plan(timings=TIMINGS | {"top-k": timing})


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"workers": 1}, ValueError, r"\(workers\): must be at least 2, got 1"),
        ({"workers": 0}, ValueError, r"\(workers\): must be at least 2, got 0"),
        ({"workers": "4"}, TypeError, r"\(workers\): must be a whole number, got '4'"),
        ({"workers": 2.5}, TypeError, r"\(workers\): must be a whole number"),
        ({"fast": (1, fg.planning.Link("50GB/s"))}, ValueError, r"\(fast\): must be a divisor"),
        ({"fast": (3, fg.planning.Link("50GB/s"))}, ValueError, r"\(fast\): must be a divisor"),
        ({"fast": (8, fg.planning.Link("50GB/s"))}, ValueError, r"\(fast\): .* leaves two groups"),
        ({"fast": (2, None)}, TypeError, "number or a text"),
        ({"fast": (2, "1GB/s"), "axis_name": "data"}, ValueError, r"use\n? *\('slow', 'fast'\)"),
        ({"axis_name": ["data"]}, TypeError, "use 'data'"),
        ({"link": [1]}, TypeError, "number or a text"),
        ({"rows": ["x"]}, TypeError, r"\(rows\): must be a candidate, got 'x'"),
        ({"rows": [ROWS[0], ROWS[0]]}, ValueError, "rename one"),
        ({"buckets": 1.5}, TypeError, r"\(buckets\): must be a whole number"),
        ({"buckets": 0}, ValueError, r"\(buckets\): must be at least 1"),
        ({"step": -1}, ValueError, r"\(step\): must be finite and not negative"),
        ({"step": "soon"}, ValueError, r"\(step\): must be seconds"),
        ({"params": {}}, ValueError, r"\(params\): must have values"),
        ({"params": {"w": jnp.zeros((0, 3))}}, ValueError, r"\(params\): must have values"),
    ],
)
def test_mistakes_are_said_before_anything_is_timed(options, kind, said):
    known = KNOWN | options
    params = known.pop("params", LIKE)
    for ask in (fg.planning.plan, fg.planning.measure):
        with pytest.raises(kind, match=said):
            ask(params, **known)


def test_an_algorithm_is_known_before_anything_is_timed():
    with pytest.raises(ValueError, match=r"plan\(algorithm\): .*use 'fastest'"):
        fg.planning.plan(LIKE, algorithm="rings", **KNOWN)
    with pytest.raises(ValueError, match=r"predict_step\(algorithm\): .*use 'fastest'"):
        fg.planning.predict_step(
            optax.identity(), LIKE, step=1.0, link="1gbit", axes={"data": 2}, algorithm="rings"
        )


def test_what_is_no_candidate():
    for options, kind, said in (
        ({"loss": "great"}, ValueError, r"Candidate\(loss\): .*'as dense'"),
        ({"every": 2.5}, TypeError, r"Candidate\(every\): must be a whole number"),
        ({"every": 0}, ValueError, "use 4"),
        ({"steps": 0.0}, ValueError, r"Candidate\(steps\): .*use 1.2"),
        ({"steps": math.nan}, ValueError, r"Candidate\(steps\): .*use 1.2"),
    ):
        with pytest.raises(kind, match=said):
            fg.planning.Candidate("a", fg.AllReduce(), **options)


def test_a_link_may_be_a_bandwidth_alone(monkeypatch):
    monkeypatch.setattr(_measure, "_time_rows", lambda *_: {})
    assert fg.planning.measure(LIKE, **KNOWN).link == fg.planning.Link("1gbit")
    tx, options = (
        ROWS[0].transformation("data"),
        {"step": 1.0, "timing": fg.planning.Timing(0.0, 0.0)},
    )
    seconds = {
        fg.planning.predict_step(tx, LIKE, link=link, axes={"data": 4}, **options)
        for link in ("1gbit", 1.25e8, fg.planning.Link("1gbit"), {"data": "1gbit"})
    }
    assert len(seconds) == 1


def test_a_mesh_has_the_axis():
    mesh = mesh_of(4)
    for ask in (
        lambda: fg.planning.measure(LIKE, step=1.0, mesh=mesh, axis_name="replica"),
        lambda: fg.planning.measure(LIKE, step=1.0, mesh=mesh, fast=(2, "50GB/s")),
        lambda: fg.planning.time_exchange(
            ROWS[0].transformation("data"), LIKE, {"replica": 4}, mesh=mesh
        ),
    ):
        with pytest.raises(ValueError, match=r"must be an axis of the mesh.*use one of these"):
            ask()


@pytest.mark.parametrize("step", [lambda: None, dict, lambda: 0.1])
def test_a_step_returns_what_to_wait_for(step):
    with pytest.raises(ValueError, match=r"measure\(step\): .*end the function with return"):
        fg.planning.measure(LIKE, **KNOWN | {"step": step})
