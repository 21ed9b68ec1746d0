"""What a plan rests on: links and updates, measured where they are known."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parallel import mesh_of

import fftgrad as fg
from fftgrad.planning import _exchange, _link
from fftgrad.planning._link import Sent

ROWS = [
    fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
    fg.planning.Candidate("signs", fg.Recipe(fg.AllGather(fg.Sign()), fg.ErrorFeedback())),
    fg.planning.Candidate("local", fg.Recipe(fg.AllGather(fg.Sign()), fg.ErrorFeedback()), every=3),
]
LIKE = {"w": jax.ShapeDtypeStruct((30, 40), "float32"), "b": jax.ShapeDtypeStruct((7,), "bfloat16")}


def test_a_link_is_found_from_what_collectives_take():
    rng = np.random.default_rng(0)
    share = {"all-reduce": 1.0, "all-gather": 0.95, "all-to-all": 0.6}
    rows = [(k, rounds, size) for k, rounds in zip(share, (6, 3, 3), strict=True)
            for size in (1e4, 1e6, 1e8)]  # fmt: skip
    exact = [Sent(k, r, s, r * 2e-4 + s / 1e8 / share[k]) for k, r, s in rows]
    link = _link.fit(exact)
    assert (link.latency, link.bandwidth) == pytest.approx((2e-4, 1e8))
    assert dict(link.shares) == pytest.approx({"all-gather": 0.95, "all-to-all": 0.6})
    assert link.residual < 1e-6
    noisy = [t._replace(seconds=t.seconds * rng.uniform(0.9, 1.1)) for t in exact]
    link = _link.fit(noisy)
    assert (link.latency, link.bandwidth) == pytest.approx((2e-4, 1e8), rel=0.25)
    assert 0.01 < link.residual < 0.15


def test_short_messages_that_pass_at_once_do_not_raise_the_bandwidth():
    """Links let so many bytes through before they slow down."""
    found = [Sent("all-gather", 3, s, max(1e-4, (s - 5e4) / 1e7)) for s in (1e4, 1e6, 1e7)]
    link = _link.fit(found)
    assert link.bandwidth == pytest.approx(1e7, rel=0.01)
    assert link.latency < 1e-4


def test_a_link_never_has_a_negative_latency():
    sizes = (1e3, 1e6, 1e8)
    link = _link.fit([Sent("all-gather", 3, s, s / 1e8 * 0.99) for s in sizes])
    assert link.latency == 0
    assert link.bandwidth > 0


@pytest.mark.parametrize("workers", [2, 8])
def test_the_links_of_simulated_devices(workers):
    link = fg.planning.measure_link(mesh_of(workers), "data", seconds=0.01)
    assert 1e6 < link.bandwidth < 1e13
    assert 0 <= link.latency < 1
    assert link.residual > 0


def test_one_worker_has_no_link():
    with pytest.raises(ValueError, match="give the link"):
        fg.planning.measure_link(mesh_of(1))
    with pytest.raises(ValueError, match="axis of the mesh"):
        fg.planning.measure_link(mesh_of(2), "model")


def test_all_rows_are_timed_and_make_a_plan():
    heard = []
    measured = fg.planning.measure(
        LIKE, step="20ms", mesh=mesh_of(4), rows=ROWS, buckets=2, seconds=0.01, tell=heard.append
    )
    assert heard == ["link", "dense", "signs", "local"]
    assert (measured.workers, measured.step) == (4, 0.02)
    assert {timing.workers for timing in measured.timings.values()} == {(4,)}
    assert list(measured.timings) == ["dense", "signs", "local"]
    for timing in measured.timings.values():
        assert min(timing[:2]) >= 0
        assert sum(timing[:2]) > 0  # of what is this short, either part can be lost in noise
    assert measured.timings["signs"].compress > 0
    assert measured.timings["local"].compress == 0
    found = fg.planning.plan(LIKE, rows=ROWS, **measured._asdict())
    assert {row.name for row in found.rows} == {"dense", "signs", "local"}


def test_a_plan_measures_what_it_is_not_told():
    heard = []
    found = fg.planning.plan(
        LIKE, step=lambda: jnp.ones(3), mesh=mesh_of(2), rows=ROWS[:1], seconds=0.01,
        tell=heard.append,
    )  # fmt: skip
    assert heard == ["link", "step", "dense"]
    assert (found.workers, found.measured.axis_name) == (2, "data")
    assert list(found.measured.timings) == ["dense"]
    assert 0 < found.measured.step < found.best.seconds
    assert found.link.residual > 0
    with pytest.raises(ValueError, match=r"plan\(workers, link, mesh\): .*pass mesh=mesh"):
        fg.planning.plan(LIKE, step=1.0, workers=2)


def test_what_cannot_hide_is_not_timed_apart():
    link = fg.planning.Link("1gbit")
    measured = fg.planning.measure(
        LIKE, step=1.0, workers=4, link=link, rows=ROWS[1:2], seconds=0.01
    )
    assert measured.timings["signs"].compress == 0
    assert measured.timings["signs"].decompress > 0


def test_a_chain_of_ones_own_is_timed_and_predicted():
    """Of a chain that a candidate says too, it is what a plan says."""
    row, link = ROWS[1], fg.planning.Link("100mbit", "1ms")
    timing = fg.planning.time_exchange(row.transformation("data"), LIKE, {"data": 4}, seconds=0.01)
    assert min(timing[:2]) >= 0
    assert sum(timing[:2]) > 0
    for buckets in (1, 4):
        timings = {"signs": timing, "dense": fg.planning.Timing(0.0, 0.0)}
        found = fg.planning.plan(
            LIKE, step="2ms", link=link, workers=4, rows=ROWS[:2], timings=timings, buckets=buckets
        )
        (planned,) = (one for one in found.rows if one.name == "signs")
        chain = eval(planned.code, {"fg": fg})  # cut as the plan says
        seconds = fg.planning.predict_step(
            chain, LIKE, step="2ms", link=link, axes={"data": 4}, timing=timing, buckets=buckets,
        )  # fmt: skip
        assert seconds == planned.seconds


def test_each_axis_of_a_chain_has_its_link():
    tx = fg.compressed_pmean(
        fg.Hierarchical("fast", 2, slow=fg.AllReduce()), axis_name=("slow", "fast")
    )
    links = {"slow": fg.planning.Link("100mbit"), "fast": fg.planning.Link("100gbit")}
    options = {"step": 0.0, "axes": {"slow": 4, "fast": 2}, "timing": fg.planning.Timing(0.0, 0.0)}
    both = fg.planning.predict_step(tx, LIKE, link=links, **options)
    assert both < fg.planning.predict_step(tx, LIKE, link=links["slow"], **options)
    assert both > fg.planning.predict_step(tx, LIKE, link=links["fast"], **options)
    with pytest.raises(ValueError, match="fast"):
        fg.planning.predict_step(tx, LIKE, link={"slow": links["slow"]}, **options)


def predicted(tx, every=1, step=0.0, **options):
    known = {
        "link": fg.planning.Link(1e6, 0.0),
        "axes": {"data": 2},
        "timing": fg.planning.Timing(0.0, 0.0),
    }
    return fg.planning.predict_step(
        tx, jnp.zeros((8, 1000)), step=step, every=every, **known | options
    )


def local_steps(fragments, exchange=fg.AllReduce()):  # noqa: B008
    return fg.optimizers.diloco(
        optax.identity(), optax.sgd(1.0), 4, exchange, axis_name="data", fragments=fragments
    )


def test_what_is_sent_in_each_step_counts_in_each():
    """Also where `every` says that most have no exchange."""
    each = 4 * 8000 / 1e6
    assert predicted(fg.compressed_pmean(fg.AllReduce(), axis_name="data")) == each
    with pytest.raises(ValueError, match="say every=4"):
        predicted(local_steps(1))
    assert predicted(local_steps(1), 4) == pytest.approx(each / 4)
    assert predicted(local_steps(4), step=1.0) == pytest.approx(1 + each / 4)  # nothing hides
    for every in (1, 4):
        assert predicted(local_steps(4), every) == pytest.approx(each / 4)
    assert predicted(local_steps(2), 2) == pytest.approx(each / 4)


def test_what_is_sent_in_a_loop_or_in_some_meetings_is_not_predicted():
    def three_times(updates, state, _):
        return jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.pmean(x, "data"), updates), state

    with pytest.raises(ValueError, match="unroll it"):
        predicted(optax.GradientTransformation(lambda _: (), three_times))
    warm = fg.Scheduled({0: fg.AllReduce(), 5: fg.AllGather(fg.Sign())})
    with pytest.raises(ValueError, match="changes by step"):
        predicted(local_steps(1, warm), 4)


def test_counts_are_positive():
    tx = local_steps(1)
    for options in ({"every": 0}, {"buckets": 0}):
        with pytest.raises(ValueError, match=r"predict_step\(.*at least 1, got 0"):
            predicted(tx, **options)
    with pytest.raises(ValueError, match=r"time_exchange\(every\)"):
        fg.planning.time_exchange(tx, LIKE, {"data": 2}, every=0)


def test_what_changes_by_step_is_not_predicted():
    exchange = fg.Scheduled({0: fg.AllReduce(), 5: fg.AllGather(fg.Sign())})
    tx = fg.compressed_pmean(exchange, axis_name="data")
    with pytest.raises(ValueError, match=r"predict_step\(tx\): must send the same"):
        fg.planning.predict_step(
            tx,
            LIKE,
            step=1.0,
            link=fg.planning.Link("1gbit"),
            axes={"data": 2},
            timing=fg.planning.Timing(0.0, 0.0),
        )


def test_local_steps_are_timed_until_they_meet(monkeypatch):
    """All of them: a turn ends with the step that exchanges."""
    ended = []

    def once(run, inputs, *_):
        _, state = run(inputs[0])
        ended.append(int(state.step))
        return _exchange._timing.Timed(1.0, 1.0, 1.0, 1)

    monkeypatch.setattr(_exchange._timing, "timed", once)
    found = fg.planning.time_exchange(local_steps(1), LIKE, {"data": 2}, every=4)
    assert found[:3] == (0.0, 1.0, (2,))
    assert found.compile > 0
    assert ended == [4]


def test_a_step_is_timed():
    def step():
        time.sleep(0.02)
        return jnp.ones(3)

    link = fg.planning.Link("1gbit")
    measured = fg.planning.measure(
        LIKE, step=step, workers=2, link=link, rows=ROWS[:1], seconds=0.05
    )
    assert 0.02 <= measured.step < 1
    assert measured.link is link


def test_more_workers_take_longer_to_decode():
    """On one device, whatever their number."""
    like = jax.ShapeDtypeStruct((1 << 18,), "float32")
    codec = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.5))
    row = fg.planning.Candidate("fft", fg.AllGather(codec))
    few, many = (
        fg.planning.time_exchange(row.transformation("data"), like, {"data": workers}, seconds=0.05)
        for workers in (2, 128)
    )
    assert many.decompress > few.decompress


def test_what_is_timed_with_is_no_zeros():
    tree, other = _exchange.inputs_like(LIKE)
    assert tree["b"].dtype == jnp.bfloat16
    flat = np.asarray(tree["w"]).ravel()
    assert np.all(flat != 0)
    assert np.mean(flat**4) / np.mean(flat**2) ** 2 > 10  # heavy tails
    assert not np.array_equal(flat, np.asarray(other["w"]).ravel())


@pytest.mark.parametrize(
    ("kwargs", "remedy"),
    [
        ({"step": 1.0, "workers": 4}, "pass mesh=mesh"),
        ({"step": 1.0, "link": fg.planning.Link("1gbit")}, "pass mesh=mesh"),
        ({"step": "soon", "workers": 4, "link": fg.planning.Link("1gbit")}, "use '300ms'"),
    ],
)
def test_mistakes(kwargs, remedy):
    with pytest.raises(ValueError, match=remedy):
        fg.planning.measure(LIKE, rows=ROWS, **kwargs)
