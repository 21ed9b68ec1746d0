"""What a plan says of speed, and what it puts first."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fftgrad as fg
from fftgrad.planning import _candidates, _plan, _predict
from fftgrad.planning._plan import predict_row, sort

LIKE = {"w": jax.ShapeDtypeStruct((1000, 1000), "float32")}
DENSE = fg.planning.Candidate("dense", fg.AllReduce(), dense=True, loss="as dense")


def faster_by(factor, **options):
    """The recommended row where an identical exchange is so many times as fast."""
    row = fg.planning.Candidate("other", fg.AllReduce(), loss="close", **options)
    slow = fg.planning.Timing(0.0, 0.1 * (factor - 1))
    found = fg.planning.plan(
        LIKE, step=0.1, link=fg.planning.Link(1e15, 0.0), workers=4, buckets=1, rows=[DENSE, row],
        timings={"dense": slow, "other": fg.planning.Timing(0.0, 0.0)},
    )  # fmt: skip
    return found.best.name, {one.name: one.why_not for one in found.rows}[row.name]


def test_a_row_has_to_be_a_tenth_faster_to_the_same_loss():
    assert faster_by(1.09, steps=1.0) == ("dense", "under 10% faster")
    assert faster_by(1.11, steps=1.0) == ("other", "")
    assert faster_by(1.12, steps=1.13) == ("dense", "slower")
    assert faster_by(1.23, steps=1.13) == ("dense", "under 10% faster")
    assert faster_by(1.25, steps=1.13) == ("other", "")


@pytest.mark.parametrize("workers", [4, 512])
def test_what_a_plan_recommends_is_never_slower_than_dense(workers):
    """Whatever the link, the step, and what an exchange takes on the device."""
    rng = np.random.default_rng(workers)
    groups = _predict.groups(workers, None)
    rows = _candidates.candidates(LIKE, workers)
    rows = rows[:2] + rows[2::5]  # those that are dense, and a few of the others
    sent = {row.name: _plan._sent(row, LIKE, groups) for row in rows}
    for _ in range(80):
        bandwidth, latency, step, codec = 10 ** rng.uniform([5, -6, -4, -5], [12, -1, 1, 0])
        link = fg.planning.Link(bandwidth, latency)
        algorithm, buckets = str(rng.choice(typing.get_args(_plan.Algorithm))), rng.integers(1, 9)
        known = int(buckets), step, link, groups, algorithm
        told = [
            predict_row(row, fg.planning.Timing(*codec * rng.random(2)), sent[row.name], *known)
            for row in rows
        ]
        found = fg.planning.Plan(sort(told))
        assert found.best.seconds <= min(row.seconds for row in told if row.is_dense)
        assert found.compress != found.best.is_dense


def test_a_loss_is_one_to_check_beyond_twice_the_ratio_it_was_measured_with(monkeypatch):
    name, usual = "PowerSGD 4, Muon", _candidates.candidates
    few = lambda *given: [row for row in usual(*given) if row.dense or row.name == name]  # noqa: E731
    monkeypatch.setattr(_plan, "candidates", few)
    for side, loss in ((64, "close"), (4096, "check")):
        like = {"w": jax.ShapeDtypeStruct((side, side), "float32")}
        plan = fg.planning.plan(like, step="1s", link="1mbit", workers=4, device="h100")
        row = next(row for row in plan.rows if row.name == name)
        assert (row.loss, "check" in row.why_not) == (loss, loss == "check")


def test_a_plan_says_where_workers_may_share_the_matrices_of_muon():
    like = {"up": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    fast = 8, fg.planning.Link("50GB/s", 0.0)
    over = {"step": "1s", "link": "100mbit", "workers": 16, "device": "a100"}
    seconds = max(row.parts.muon for row in fg.planning.plan(like, **over).rows)
    sent = 7 / 8 * 2 * 4096**2 / 50e9
    took, instead = (fg.planning._text.quantity(s, "s") for s in (seconds / 8 + sent, seconds))
    text = fg.planning.plan(like, **over, fast=fast).source
    assert f"With share_axis='fast', Muon's matrices take {took} in place of {instead}." in text
    assert "share_axis" not in fg.planning.plan(like, **over).source
