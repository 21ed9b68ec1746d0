"""The model of a step: its closed forms, and predictions of chains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fftgrad as fg
from fftgrad.planning import _timing
from fftgrad.planning._predict import (
    Parts,
    collective_seconds,
    exchange_seconds,
    rounds,
    step_seconds,
)

LINK = fg.planning.Link(1e6, 1e-3)


def gathered(size, workers, axes=("data",)):
    return fg.tools.Collective("all-gather", "u32", (size // 4,), size, (), False, workers, axes)


@pytest.mark.parametrize(
    ("kind", "algorithm", "turns", "times"),
    [
        ("all-reduce", "ring", 14, 1.75),
        ("all-reduce", "tree", 6, 1.75),
        ("all-gather", "ring", 7, 7),
        ("all-gather", "tree", 3, 7),
        ("reduce-scatter", "ring", 7, 0.875),
        ("reduce-scatter", "tree", 3, 0.875),
        ("all-to-all", "ring", 7, 0.875),
        ("all-to-all", "tree", 7, 0.875),
        ("collective-permute", "ring", 1, 1),
    ],
)
def test_a_collective_of_eight_workers(kind, algorithm, turns, times):
    assert rounds(kind, 8, algorithm) == turns
    found = collective_seconds(kind, 4000, 8, LINK, algorithm)
    assert found == pytest.approx(turns * 1e-3 + times * 4000 / 1e6)
    assert collective_seconds(kind, 4000, 1, LINK, algorithm) == 0


@pytest.mark.parametrize(
    ("kind", "turns", "times"),
    [
        ("all-reduce", 18, 2),  # a pipelined tree, up and down
        ("all-gather", 9, 511),
        ("reduce-scatter", 9, 511 / 512),
        ("all-to-all", 511, 511 / 512),
        ("collective-permute", 1, 1),
    ],
)
def test_short_messages_among_many_workers_go_by_trees(kind, turns, times):
    """As 0.5 MB among 512 workers over 1 Gbit/s."""
    link = fg.planning.Link(1.25e8, 1e-4)
    found = collective_seconds(kind, 500_000, 512, link)
    assert found == pytest.approx(turns * 1e-4 + times * 500_000 / 1.25e8)
    ring = collective_seconds("all-reduce", 1e9, 4, link, "ring")
    assert collective_seconds("all-reduce", 1e9, 4, link) == ring


def test_the_slowest_axis_holds_up_a_collective():
    links = {"slow": fg.planning.Link(1e6, 0.0), "fast": fg.planning.Link(1e9, 0.5)}
    assert exchange_seconds([gathered(1000, 3, ("slow",))], links, "ring") == pytest.approx(2e-3)
    both = exchange_seconds([gathered(1000, 3, ("slow", "fast"))], links, "ring")
    assert both == pytest.approx(2 * 0.5 + 2e-6)
    two = [gathered(1000, 3, ("slow",)), gathered(500, 2, ("slow",))]
    assert exchange_seconds(two, links) == pytest.approx(2e-3 + 5e-4)


def test_nothing_hides_in_one_bucket_and_most_in_many():
    parts = Parts(step=1.0, compress=0.1, exchange=0.8, decompress=0.2)
    assert step_seconds(parts) == pytest.approx(2.1)
    assert step_seconds(parts, buckets=8) == pytest.approx(1.1 + 0.1 + 0.2)
    slow = parts._replace(exchange=8.0)
    assert step_seconds(slow, buckets=8) == pytest.approx(7.0 + 1.0 + 0.2)
    assert step_seconds(slow, every=4) == step_seconds(slow, every=4, buckets=8)
    assert step_seconds(slow, every=4) == pytest.approx(1 + 8.3 / 4)
    # Of dense training it is Agarwal et al., arXiv:2103.00543: max(step, 8 messages) + the last.
    dense = Parts(step=0.3, compress=0.0, exchange=9 * 0.05, decompress=0.0)
    assert step_seconds(dense, buckets=9) == pytest.approx(max(0.3, 8 * 0.05) + 0.05)


LIKE = {"w": jax.ShapeDtypeStruct((30, 40), "float32"), "b": jax.ShapeDtypeStruct((7,), "bfloat16")}
SIGNS = fg.Recipe(fg.AllGather(fg.Sign()), fg.ErrorFeedback())


def test_a_chain_of_ones_own_is_timed_and_predicted():
    """Of a chain that a candidate says too, it is what a plan says."""
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
        fg.planning.Candidate("signs", SIGNS),
    ]
    link = fg.planning.Link("100mbit", "1ms")
    chain = fg.compressed_pmean(SIGNS, axis_name="data")
    timing = fg.planning.time_exchange(chain, LIKE, {"data": 4}, seconds=0.01)
    assert min(timing) >= 0
    assert sum(timing) > 0
    for buckets in (1, 4):
        timings = {"signs": timing, "dense": fg.planning.Timing(0.0, 0.0)}
        found = fg.planning.plan(
            LIKE, step="2ms", link=link, workers=4, rows=rows, timings=timings, buckets=buckets
        )
        (planned,) = (one for one in found.rows if one.name == "signs")
        cut = eval(planned.code, {"fg": fg})  # as the plan says
        seconds = fg.planning.predict_step(
            cut, LIKE, step="2ms", link=link, axes={"data": 4}, timing=timing, buckets=buckets,
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
        tx, np.zeros((8, 1000), np.float32), step=step, every=every, **known | options
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
    assert predicted(local_steps(4), 4) == pytest.approx(each / 4)
    assert predicted(local_steps(2), 2) == pytest.approx(each / 4)


def test_what_is_sent_in_a_loop_or_in_some_meetings_is_not_predicted():
    def three_times(updates, state, _):
        return jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.pmean(x, "data"), updates), state

    with pytest.raises(ValueError, match="unroll it"):
        predicted(optax.GradientTransformation(lambda _: (), three_times))
    warm = fg.Scheduled({0: fg.AllReduce(), 5: fg.AllGather(fg.Sign())})
    with pytest.raises(ValueError, match="changes by step"):
        predicted(local_steps(1, warm), 4)
    tx = fg.compressed_pmean(warm, axis_name="data")
    with pytest.raises(ValueError, match=r"predict_step\(tx\): must send the same"):
        predicted(tx)


def test_local_steps_are_timed_until_they_meet(monkeypatch):
    """All of them: a turn ends with the step that exchanges."""
    ended = []

    def once(run, inputs, *_):
        _, state = run(inputs[0])
        ended.append(int(state.step))
        return _timing.Timed(1.0, 1.0, 1)

    monkeypatch.setattr(_timing, "timed", once)
    found = fg.planning.time_exchange(local_steps(1), LIKE, {"data": 2}, every=4)
    assert found == fg.planning.Timing(0.0, 1.0)
    assert ended == [4]


def test_what_is_timed_with_is_no_zeros():
    tree, other = _timing.heavy_tailed(LIKE)
    assert tree["b"].dtype == jnp.bfloat16
    flat = np.asarray(tree["w"]).ravel()
    assert np.all(flat != 0)
    assert np.mean(flat**4) / np.mean(flat**2) ** 2 > 10  # heavy tails
    assert not np.array_equal(flat, np.asarray(other["w"]).ravel())
