"""Plans: what is predicted over one level of links or two, and that the code is the code meant."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from cases import SLOW, drawn

import fftgrad as fg
from fftgrad.exchanges import _bucketing
from fftgrad.planning import _candidates, _plan, _predict, _timing

LIKE = {
    "w": jax.ShapeDtypeStruct((400, 500), "float32"),
    "b": jax.ShapeDtypeStruct((40,), "float32"),
}
WORKERS = 4


def timings(rows):
    """Dense takes less to handle than what is compressed."""
    times = {True: fg.planning.Timing(1e-4, 1e-4), False: fg.planning.Timing(1e-3, 2e-3)}
    return {row.name: times[row.dense] for row in rows}


NAMES = (
    "dense float32", "dense bfloat16", "two stages 25x, Muon", "EDEN 1 bit (DRIVE)",
    "top-k 4 %, 4 bits", "signs, two stages", "4 local steps, signs",
)  # fmt: skip
"""Rows of the usual plan: tracing all candidates takes a while."""


@functools.cache
def usual(link="100mbit"):
    return plan(link)


def plan(link="100mbit", workers=WORKERS, rows=(), **kwargs):
    rows = rows or [row for row in _candidates.candidates(LIKE, workers) if row.name in NAMES]
    known = {"step": "20ms", "buckets": 1, "timings": timings(rows)} | kwargs
    return fg.planning.plan(LIKE, link=link, workers=workers, rows=rows, **known)


def some(rows):
    """Of the parts that candidates are made of, one row of each."""
    of = {row.name: row for row in rows}
    parts = lambda name: {*re.findall(r"[A-Z]\w+", repr(of[name].recipe)), of[name].every}  # noqa: E731
    return [row for row in rows if row.name in drawn(of, parts, always=["dense float32"])]


def by_name(found):
    return {row.name: row for row in found.rows}


def test_default_rows_are_traced_by_one_bucket(monkeypatch):
    """A trace does not grow with the model: each row sends as much as if all of it were traced."""
    for module in (_bucketing, _candidates, _plan):
        monkeypatch.setattr(module, "BUCKET_LIMIT", 1 << 14)
    like = {f"w{i}": jax.ShapeDtypeStruct((101, 99), "float32") for i in range(6)}
    names = {"dense float32", "two stages 25x, Muon", "4 local steps, signs", "PowerSGD rank 4"}
    rows = [row for row in _candidates.candidates(like, WORKERS) if row.name in names]
    monkeypatch.setattr(_plan, "candidates", lambda *_: rows)
    known = {"step": "20ms", "link": "1mbit", "workers": WORKERS, "timings": timings(rows)}
    for buckets in (1, 4):
        found = by_name(fg.planning.plan(like, buckets=buckets, **known))
        whole = by_name(fg.planning.plan(like, buckets=buckets, rows=rows, **known))
        assert found.keys() == whole.keys() == names
        for name, row in whole.items():
            assert found[name].link_bytes == pytest.approx(row.link_bytes, rel=0.05), name
            assert found[name].seconds == pytest.approx(row.seconds, rel=0.1), name


def test_a_row_is_the_sum_of_its_parts():
    found = by_name(plan(link=fg.planning.Link("100mbit", "1ms")))
    dense = found["dense float32"]
    sent = 4 * 200_040 * 2 * 3 / 4
    assert dense.link_bytes == sent
    assert dense.parts.exchange == pytest.approx(6e-3 + sent / 1.25e7)
    assert dense.seconds == pytest.approx(0.02 + 2e-4 + dense.parts.exchange)
    local = found["4 local steps, signs"]
    each = found["signs, two stages"]
    assert local.seconds - 0.02 == pytest.approx((each.seconds - 0.02) / 4, rel=0.05)
    for row in found.values():
        assert sum(row.parts) == pytest.approx(row.seconds), row.name
    assert local.parts.decompress == pytest.approx(each.parts.decompress / 4)
    assert local.link_bytes == pytest.approx(each.link_bytes / 4)


def test_a_slow_link_is_compressed_and_a_fast_one_not():
    """The best dense is what others are compared with."""
    slow, fast, middle = usual("100mbit"), usual("100gbit"), usual("1gbit")
    assert slow.compress
    assert slow.best.to_loss < slow.dense.to_loss / 2
    assert slow.best.loss in ("as dense", "close")
    assert not fast.compress
    assert fast.best.name.startswith("dense")
    assert str(fast.best).startswith("fg.compressed_pmean(")
    dense = [row for row in middle.rows if row.is_dense]
    assert {row.name for row in dense} == {"dense float32", "dense bfloat16"}
    assert middle.dense.seconds == min(row.seconds for row in dense)
    assert middle == plan("1gbit")  # it is deterministic
    assert str(middle).endswith(middle.source)
    assert all(len(line) <= 90 for line in str(middle).splitlines())


def test_rows_are_ranked_by_seconds_to_the_loss_and_all_but_one_say_why_not():
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True, loss="as dense"),
        fg.planning.Candidate("same", fg.AllReduce(), loss="as dense"),
        fg.planning.Candidate("worse", fg.AllGather(fg.Sign()), loss="check"),
        fg.planning.Candidate("unknown", fg.AllGather(fg.TopK(0.001)), steps=1.0),
        fg.planning.Candidate("good", fg.AllGather(fg.TopK(0.01)), loss="close"),
    ]
    found = plan(rows=rows)
    assert [row.to_loss for row in found.rows] == sorted(row.to_loss for row in found.rows)
    assert {row.name: row.why_not for row in found.rows} == {
        "unknown": "not measured",
        "good": "",
        "worse": "loss: check",
        "dense": "slower",
        "same": "slower",
    }
    assert found.best.name == "good"
    fast = plan("100gbit", rows=rows)
    assert fast.best.name == "dense"
    assert all((row.why_not == "") == (row.name == "dense") for row in fast.rows)


@pytest.mark.parametrize("choose", [some, pytest.param(list, marks=SLOW)])
@pytest.mark.parametrize("fast", [1, 2])
def test_the_code_makes_what_was_meant(fast, choose):
    axis = "data" if fast == 1 else ("slow", "fast")
    for row in choose(_candidates.candidates(LIKE, 4, fast)):
        code, space = row.code(axis), {"fg": fg, "optax": optax}
        made = eval(code, space | {"optimizer": optax.sgd(0.1), "learning_rate": 0.1})
        meant = jax.tree.leaves(jax.eval_shape(row.transformation(axis).init, LIKE))
        assert jax.tree.leaves(jax.eval_shape(made.init, LIKE)) == meant
        head = "fg.optimizers.diloco(optimizer, " if row.every > 1 else "fg.compressed_pmean("
        if row.optimizer is not None:
            head = f"fg.optimizers.{row.optimizer.func.__name__}(learning_rate, "
            if row.every > 1:
                head = "fg.optimizers.diloco(optax.contrib.muon(learning_rate, "
            numbers = ", ".join(f"{name}={x}" for name, x in row.optimizer.keywords.items())
            assert f", {numbers}{')' if row.every > 1 else ', '}" in code
        assert code.startswith(head)
        if row.every > 1 or row.recipe.bucketing != fg.Bucketing():
            continue
        inside = code.removeprefix(head).removesuffix(f", axis_name={axis!r})")
        inside = re.sub(r", lead=[\d.]+$", "", inside)
        assert eval(f"fg.Recipe({inside})", space) == row.recipe


def test_what_is_printed_is_python():
    """With what becomes of the user's optimizer."""
    rows = by_name(usual())
    kept, gone = rows["EDEN 1 bit (DRIVE)"], rows["top-k 4 %, 4 bits"]
    assert str(kept) == kept.code
    assert str(gone) == f"{gone.code}  # in place of your optimizer, with its own learning rate"
    assert "feedback_adam(learning_rate, " in gone.code
    made = eval(str(gone), {"fg": fg, "learning_rate": 0.1})
    state = jax.eval_shape(made.init, np.zeros(9, np.float32))
    assert optax.tree.get(state, "residual") is not None


def test_buckets_hide_what_they_can_and_are_in_the_code():
    some = ("dense float32", "4 local steps, signs", "TernGrad, shared scale")
    rows = [row for row in _candidates.candidates(LIKE, WORKERS) if row.name in some]
    one, many = (by_name(plan("1gbit", rows=rows, buckets=buckets)) for buckets in (1, 4))
    dense = one["dense float32"], many["dense float32"]
    assert dense[1].seconds < dense[0].seconds
    assert "bucketing=fg.Bucketing(bucket_bytes=200040)" in dense[1].code
    assert many["4 local steps, signs"].seconds == one["4 local steps, signs"].seconds
    assert "bucketing" not in many["4 local steps, signs"].code
    assert (
        "bucketing=fg.Bucketing(scope='leaf', bucket_bytes=200040)"
        in many["TernGrad, shared scale"].code
    )


def test_each_bucket_has_its_latency_and_its_header():
    """As Agarwal et al. count: all but the last hide, and each goes around on its own."""
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
        fg.planning.Candidate("signs", fg.AllGather(fg.Sign())),
    ]
    free = {row.name: fg.planning.Timing(0.0, 0.0) for row in rows}
    link = fg.planning.Link("100gbit", "1ms")
    found = by_name(plan(link, rows=rows, buckets=5, timings=free, algorithm="ring"))
    dense, over = found["dense"], 4 * 200_040 * 1.5 / link.bandwidth
    assert dense.parts.exchange == pytest.approx(5 * 6e-3 + over)
    assert dense.seconds == pytest.approx(4 * 6e-3 + 0.8 * over + 6e-3 + 0.2 * over)
    cut = fg.Bucketing(bucket_bytes=4 * 200_040 // 5)
    assert found["signs"].link_bytes == fg.link_bytes(fg.Sign(), LIKE, 4, cut)


DENSE = fg.planning.Candidate("dense", fg.AllReduce(), dense=True)
CHANGES = fg.planning.Candidate("warm", fg.Scheduled({0: fg.AllReduce(), 9: fg.AllReduce()}))


def asked(**options):
    known = {"params": LIKE, "step": "20ms", "link": "1gbit", "workers": 8} | options
    return fg.planning.plan(known.pop("params"), **known)


def mine(method=fg.AllReduce(), **options):  # noqa: B008
    return fg.planning.Candidate("mine", method, **options)


@pytest.mark.parametrize(
    ("make", "error", "remedy"),
    [
        (lambda: asked(rows=[mine()]), ValueError, "dense=True"),
        (lambda: asked(rows=[DENSE, DENSE]), ValueError, "rename one"),
        (lambda: asked(rows=["x"]), TypeError, r"\(rows\): must be a candidate, got 'x'"),
        (lambda: asked(rows=[DENSE, CHANGES], timings=timings([DENSE, CHANGES])), ValueError,
         "say every=4"),
        (lambda: asked(timings={}), ValueError, "measure with the same"),
        (lambda: asked(params=np.zeros(3, int)), TypeError, "cast it"),
        (lambda: asked(params={}), ValueError, r"\(params\): must have values"),
        (lambda: asked(step="soon"), ValueError, "use '300ms'"),
        (lambda: asked(step=-1), ValueError, r"\(step\): must be finite and not negative"),
        (lambda: asked(link="fast"), ValueError, "use '1gbit'"),
        (lambda: asked(workers=1), ValueError, "at least 2"),
        (lambda: asked(workers=2.5), TypeError, r"\(workers\): must be a whole number"),
        (lambda: asked(buckets=0), ValueError, "at least 1"),
        (lambda: asked(algorithm="rings"), ValueError, r"plan\(algorithm\): .*use 'fastest'"),
        (lambda: asked(fast=(3, "50GB/s")), ValueError, "leave it out"),
        (lambda: asked(fast=(8, "50GB/s")), ValueError, "two groups at least"),
        (lambda: mine(fg.Sign()), TypeError, "AllGather"),
        (lambda: mine(fg.methods.sign_sgd(), every=2), ValueError, "leave it to the exchange"),
        (lambda: mine(every=0), ValueError, "use 4"),
        (lambda: mine(loss="great"), ValueError, r"Candidate\(loss\): .*'as dense'"),
        (lambda: mine(steps=0.0), ValueError, r"Candidate\(steps\): .*use 1.2"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_before_anything_is_timed(monkeypatch, make, error, remedy):
    monkeypatch.setattr(_timing, "time_exchange", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(error, match=remedy):
        make()


def test_each_of_two_levels_is_on_its_links():
    exact = fg.Hierarchical("fast", 2, slow=fg.AllReduce(), memory=fg.NoMemory())
    rows = [fg.planning.Candidate("dense", exact, dense=True)]
    links = {"link": fg.planning.Link(1e6, 0.0), "fast": (2, fg.planning.Link(2e6, 0.0))}
    free = {"dense": fg.planning.Timing(0.0, 0.0)}
    found = by_name(plan(workers=8, rows=rows, timings=free, step=0.0, **links))
    dense, size = found["dense"], 4 * 200_040
    assert dense.link_bytes == fg.link_bytes(exact, LIKE, 8)
    # Half goes to the other one of the pair, and the mean of the other half comes back.
    slow, fast = size / 2 * 1.5 / 1e6, (size / 2 + size / 2) / 2e6
    assert dense.parts.exchange == pytest.approx(slow + fast, rel=1e-3)


def test_over_fast_links_all_is_hierarchical_with_the_memory_of_the_group():
    alone = {row.name: row for row in _candidates.candidates(LIKE, 4)}
    found = {row.name: row.recipe for row in _candidates.candidates(LIKE, 4, 2)}
    for name, recipe in found.items():
        own = recipe.exchange
        assert (type(own), recipe) == (fg.Hierarchical, fg.Recipe(own))
        assert fg.Recipe(own.slow, own.memory) == alone[name].recipe
        assert "rank" not in name
    assert {"4 local steps, signs", "4 local steps, two stages, Muon"} <= found.keys()


@pytest.mark.parametrize("choose", [some, pytest.param(list, marks=pytest.mark.full)])
@pytest.mark.parametrize("fast", [1, 2])
def test_the_collectives_of_the_default_rows_are_those_of_their_trace(fast, choose):
    axes = {"data": WORKERS} if fast == 1 else {"slow": WORKERS, "fast": fast}
    told = lambda found: [(c.kind, c.bytes, c.workers, c.axes) for c in found]  # noqa: E731
    for row in choose(_candidates.candidates(LIKE, WORKERS, fast)):
        exchange = getattr(row.recipe.exchange, "exchange", row.recipe.exchange)
        bucketing = fg.Bucketing().for_exchange(exchange)
        (part,) = _bucketing.bucket_likes(LIKE, bucketing)
        tx = fg.compressed_pmean(exchange, axis_name="data" if fast == 1 else tuple(axes))
        traced = _predict.traffic("tx", tx, LIKE, axes)
        assert told(_predict.sent_by(exchange, part, axes)) == told(traced), row.name
