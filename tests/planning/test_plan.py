"""Plans: what is predicted, what is put first, and that the code given is the code meant."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import SLOW, drawn
from parallel import train_step

import fftgrad as fg
from fftgrad.exchanges import _layout
from fftgrad.planning import _alone, _candidates, _exchange, _measure

LIKE = {
    "w": jax.ShapeDtypeStruct((400, 500), "float32"),
    "b": jax.ShapeDtypeStruct((40,), "float32"),
}
WORKERS = 4


def timings(rows, seconds=1e-3):
    """Dense takes less to handle than what is compressed."""
    return {
        row.name: fg.planning.Timing(seconds / 10, seconds / 10)
        if row.dense
        else fg.planning.Timing(seconds, 2 * seconds)
        for row in rows
    }


@functools.cache
def usual(link="100mbit"):
    """Tracing all candidates takes a while."""
    return plan(link)


def plan(link="100mbit", like=LIKE, workers=WORKERS, fast=1, seconds=1e-3, **kwargs):
    rows = kwargs.pop("rows", _candidates.candidates(like, workers // fast, fast))
    known = {"step": "20ms", "buckets": 1, "timings": timings(rows, seconds)} | kwargs
    return fg.planning.plan(like, link=link, workers=workers, rows=rows, **known)


def some(rows):
    """Of the parts that candidates are made of, one row of each."""
    of = {row.name: row for row in rows}
    parts = lambda name: {*re.findall(r"[A-Z]\w+", repr(of[name].recipe)), of[name].every}  # noqa: E731
    return [row for row in rows if row.name in drawn(of, parts, always=["dense float32"])]


def by_name(found):
    return {row.name: row for row in found.rows}


def test_a_model_of_many_buckets_is_planned_by_a_part_of_it(monkeypatch):
    """Whose trace does not grow: each row sends as much as if all of it were traced."""
    for module in (_layout, _candidates):
        monkeypatch.setattr(module, "BUCKET_LIMIT", 1 << 10)
    like = {f"w{i}": jax.ShapeDtypeStruct((101, 99), "float32") for i in range(3)}
    like |= {"b": jax.ShapeDtypeStruct((40,), "float32")}
    few, times = _exchange.part(like)
    assert (times, len(_layout.bucket_likes(few, fg.Layout("model")))) == (4, 8)
    names = {"dense float32", "two stages 25x, Muon", "signs, two stages"}
    rows = [row for row in _candidates.candidates(like, WORKERS) if row.name in names]
    monkeypatch.setattr(_measure, "candidates", lambda *_: rows)
    known = {"step": "20ms", "link": "1mbit", "workers": WORKERS, "timings": timings(rows)}
    found = by_name(fg.planning.plan(like, buckets=1, **known))
    monkeypatch.setattr(_exchange, "part", lambda like: (like, 1))
    for name, row in by_name(fg.planning.plan(like, buckets=1, **known)).items():
        for field in ("seconds", "wire_bytes", "link_bytes", "memory"):
            few_bytes = 100 if field == "memory" else 0  # counters of steps, which are not shared
            expected = pytest.approx(getattr(row, field), rel=0.1, abs=few_bytes)
            assert getattr(found[name], field) == expected, (name, field)


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
    assert local.wire_bytes == fg.wire_bytes(fg.TwoStage(fg.Sign(), 4), LIKE) / 4


@pytest.mark.parametrize("choose", [some, pytest.param(list, marks=SLOW)])
def test_bytes_are_those_of_the_exchange(choose):
    rows = choose(_candidates.candidates(LIKE, WORKERS))
    found = by_name(plan(rows=rows))
    for row in rows:
        told = found[row.name]
        sent = fg.wire_bytes(row.recipe, LIKE) / row.every
        assert told.wire_bytes == pytest.approx(sent), row.name
        over = fg.link_bytes(row.recipe, LIKE, WORKERS) / row.every
        assert told.link_bytes == pytest.approx(over), row.name


def test_a_slow_link_is_compressed_and_a_fast_one_not():
    slow, fast = usual("100mbit"), usual("100gbit")
    assert slow.compress
    assert slow.best.speed_up > 2
    assert slow.best.loss in ("as dense", "close")
    assert not fast.compress
    assert fast.best.name.startswith("dense")
    assert str(fast.best).startswith("fg.compressed_pmean(")


def test_the_best_dense_is_what_others_are_compared_with():
    found = usual("1gbit")
    dense = [row for row in found.rows if row.break_even is None]
    best = min(row.seconds for row in dense)
    for row in found.rows:
        assert row.speed_up == pytest.approx(best / row.seconds)
    assert {row.name for row in dense} == {"dense float32", "dense bfloat16"}


def test_what_is_hardly_faster_or_trains_worse_comes_after_dense():
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True, loss="as dense"),
        fg.planning.Candidate("same", fg.AllReduce(), loss="as dense"),
        fg.planning.Candidate("worse", fg.AllGather(fg.Sign()), loss="worse"),
        fg.planning.Candidate("unknown", fg.AllGather(fg.TopK(0.001))),
        fg.planning.Candidate("good", fg.AllGather(fg.TopK(0.01)), loss="close"),
    ]
    assert [row.name for row in plan(rows=rows).rows] == [
        "good",
        "dense",
        "same",
        "unknown",
        "worse",
    ]
    assert plan("100gbit", rows=rows).best.name == "dense"


def test_a_break_even_is_where_both_take_as_long():
    found = by_name(usual("1gbit"))
    rows = [
        row
        for row in _candidates.candidates(LIKE, 4)
        if row.dense or row.name == "top-k 4 %, 4 bits"
    ]
    rate = found["top-k 4 %, 4 bits"].break_even
    assert 1e6 < rate < 1e12
    at, below, above = (
        by_name(plan(fg.planning.Link(x), rows=rows))["top-k 4 %, 4 bits"].speed_up
        for x in (rate, rate / 2, 2 * rate)
    )
    assert at == pytest.approx(1, rel=1e-3)
    assert below > 1 > above


def test_break_evens_without_an_end():
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
        fg.planning.Candidate("free", fg.AllGather(fg.Sign())),
        fg.planning.Candidate("never", fg.AllGather(fg.Identity())),
    ]
    free = {
        "dense": fg.planning.Timing(1.0, 0.0),
        "free": fg.planning.Timing(0.0, 0.0),
        "never": fg.planning.Timing(2.0, 0.0),
    }
    found = by_name(plan(fg.planning.Link("1gbit", 0.0), rows=rows, timings=free, workers=8))
    assert found["free"].break_even == math.inf
    assert found["never"].break_even == 0.0
    assert found["dense"].break_even is None


@pytest.mark.parametrize("choose", [some, pytest.param(list, marks=SLOW)])
@pytest.mark.parametrize("fast", [1, 2])
def test_the_code_makes_what_was_meant(fast, choose):
    workers = 4 * fast
    rows = choose(_candidates.candidates(LIKE, 4, fast))
    link = (2, fg.planning.Link("50GB/s", "10us"))
    found = by_name(plan(workers=workers, fast=fast, rows=rows) if fast == 1 else fg.planning.plan(
        LIKE, step="20ms", link="1gbit", workers=workers, fast=link, rows=rows,
        timings=timings(rows), buckets=1,
    ))  # fmt: skip
    axis = "data" if fast == 1 else ("slow", "fast")
    for row in rows:
        code, space = found[row.name].code, {"fg": fg, "optax": optax}
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
        if row.every > 1 or row.recipe.layout != fg.Layout():
            continue
        inside = code.removeprefix(head).removesuffix(f", axis_name={axis!r})")
        inside = re.sub(r", (nu|lead)=[\d.]+$", "", inside)
        assert eval(f"fg.Recipe({inside})", space) == row.recipe


def test_the_best_trains():
    """The line as printed, in a chain, on real devices."""
    for row in [row for row in usual().rows if row.every == 1][:3]:
        made = eval(row.code, {"fg": fg, "optax": optax, "learning_rate": 0.1})
        like = jax.tree.map(lambda a: jnp.ones(a.shape), LIKE)
        tx = made if row.whole else optax.chain(made, optax.sgd(0.1))
        init, update = train_step(tx, WORKERS, like=like)
        grads = jax.tree.map(lambda a: jnp.ones((WORKERS, *a.shape)), LIKE)
        updates, _ = update(grads, init(like))
        assert np.all(np.isfinite(updates["w"]))
        assert np.any(updates["w"])


def test_what_is_printed_is_python():
    """With what becomes of the user's optimizer."""
    rows = by_name(usual())
    kept, gone = rows["EDEN 1 bit (DRIVE)"], rows["top-k 4 %, 4 bits"]
    assert str(kept) == kept.code
    assert str(gone) == f"{gone.code}  # in place of your optimizer, at a learning rate of its own"
    assert "feedback_adam(learning_rate, " in gone.code
    state = eval(str(gone), {"fg": fg, "learning_rate": 0.1}).init(jnp.zeros(9))
    assert optax.tree.get(state, "residual") is not None


def test_small_leaves_are_dense_where_that_costs_little():
    like = {"w": jnp.zeros((1000, 1000)), "b": jnp.zeros(50), "scale": jnp.zeros(7)}
    rows = {row.name: row for row in _candidates.candidates(like, 4)}
    codec = rows["top-k 4 %, 4 bits"].recipe.exchange.codec
    assert isinstance(codec, fg.SmallDense)
    of_leaf = {name: codec(codec.scope(name, leaf), leaf) for name, leaf in like.items()}
    assert of_leaf["b"] == of_leaf["scale"] == fg.Identity()
    assert of_leaf["w"] == fg.chain(fg.TopK(0.04), fg.LogLevels(bits=4))
    plain = fg.wire_bytes(fg.AllGather(of_leaf["w"]), like)
    assert plain < fg.wire_bytes(fg.AllGather(codec), like) <= 1.05 * plain
    # The rule is for vectors: the matrix of the program that it is pasted into may be as small.
    assert of_leaf["w"] == codec(codec.scope("w", jnp.zeros((2, 2))), jnp.zeros((2, 2)))
    alike = {"a": jnp.zeros((100, 100)), "b": jnp.zeros((100, 100))}
    for row in _candidates.candidates(alike, 4):
        assert not isinstance(getattr(row.recipe.exchange, "codec", None), fg.SmallDense)


def test_buckets_hide_what_they_can_and_are_in_the_code():
    some = ("dense float32", "4 local steps, signs", "TernGrad, shared scale")
    rows = [row for row in _candidates.candidates(LIKE, WORKERS) if row.name in some]
    one, many = (by_name(plan("1gbit", rows=rows, buckets=buckets)) for buckets in (1, 4))
    dense = one["dense float32"], many["dense float32"]
    assert dense[1].seconds < dense[0].seconds
    assert "layout=fg.Layout(bucket_bytes=200040)" in dense[1].code
    assert many["4 local steps, signs"].seconds == one["4 local steps, signs"].seconds
    assert "layout" not in many["4 local steps, signs"].code
    assert (
        "layout=fg.Layout(scope='leaf', bucket_bytes=200040)" in many["TernGrad, shared scale"].code
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
    cut = fg.Layout(bucket_bytes=4 * 200_040 // 5)
    assert found["signs"].wire_bytes == fg.wire_bytes(fg.Sign(), LIKE, cut)
    assert found["signs"].link_bytes == fg.link_bytes(fg.Sign(), LIKE, 4, cut)


def test_errors_are_those_of_what_is_sent():
    rng = np.random.default_rng(0)
    gradient = {k: rng.standard_t(3, v.shape).astype(np.float32) for k, v in LIKE.items()}
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
        fg.planning.Candidate("top-k", fg.Recipe(fg.AllGather(fg.TopK(0.1)), fg.ErrorFeedback())),
        fg.planning.Candidate(
            "shared", fg.Recipe(fg.SharedSupport(fg.TopK(0.1)), fg.ErrorFeedback())
        ),
    ]
    found = by_name(plan(rows=rows, gradients=[gradient, gradient]))
    flat = np.concatenate([gradient["b"].ravel(), gradient["w"].ravel()]).astype(np.float64)
    kept = np.sort(flat**2)[::-1][: math.ceil(0.1 * flat.size)].sum()
    assert found["dense"].error == 0
    assert found["top-k"].error == pytest.approx(math.sqrt(1 - kept / (flat**2).sum()), rel=1e-4)
    assert found["shared"].error == pytest.approx(found["top-k"].error, rel=1e-4)
    assert by_name(plan(rows=rows))["top-k"].error is None


def test_it_is_deterministic():
    found = usual("1gbit")
    assert found == plan("1gbit")
    assert str(found).count("\n") == len(found.rows) + 1
    assert str(found).endswith(found.source)
    assert all(len(line) <= 80 for line in str(found).splitlines())


DENSE = fg.planning.Candidate("dense", fg.AllReduce(), dense=True)
CHANGES = fg.planning.Candidate("warm", fg.Scheduled({0: fg.AllReduce(), 9: fg.AllReduce()}))


def over_fast_links(workers):
    fast = (4, fg.planning.Link("1gbit"))
    return fg.planning.plan(LIKE, step=1.0, link="1gbit", workers=workers, fast=fast, timings={})


@pytest.mark.parametrize(
    ("make", "error", "remedy"),
    [
        (lambda: plan(rows=[fg.planning.Candidate("a", fg.AllReduce())]), ValueError, "dense=True"),
        (
            lambda: plan(rows=[fg.planning.Candidate("a", fg.AllReduce(), dense=True)] * 2),
            ValueError,
            "rename one",
        ),
        (lambda: plan(timings={}), ValueError, "measure with the same"),
        (
            lambda: fg.planning.plan(jnp.zeros(3, int), step=1, link=1e6, workers=2),
            TypeError,
            "cast it",
        ),
        (lambda: plan(step="soon"), ValueError, "use '300ms'"),
        (lambda: plan(link="fast"), ValueError, "use '1gbit'"),
        (lambda: plan(workers=1), ValueError, "at least 2"),
        (lambda: plan(buckets=0), ValueError, "at least 1"),
        (lambda: over_fast_links(6), ValueError, "leave it out"),
        (lambda: over_fast_links(4), ValueError, "two groups at least"),
        (lambda: fg.planning.Candidate("a", fg.Sign()), TypeError, "AllGather"),
        (
            lambda: fg.planning.Candidate("a", fg.methods.sign_sgd(), every=2),
            ValueError,
            "leave it to the exchange",
        ),
        (lambda: fg.planning.Candidate("a", fg.AllReduce(), every=0), ValueError, "use 4"),
        (lambda: plan(rows=[DENSE, CHANGES]), ValueError, "say every=4"),
    ],
)
def test_mistakes(make, error, remedy):
    with pytest.raises(error, match=remedy):
        make()


@pytest.mark.parametrize(
    ("optimizer", "every"),
    [
        (optax.adam, 1),
        (3, 1),
        (functools.partial(fg.optimizers.feedback_adam, 0.1), 1),
        (fg.optimizers.feedback_adam, 4),
        (optax.contrib.muon, 1),
    ],
)
def test_an_optimizer_that_no_line_could_name_is_refused(optimizer, every):
    with pytest.raises(ValueError, match=r"Candidate\(optimizer\): must"):
        fg.planning.Candidate("mine", fg.AllReduce(), optimizer=optimizer, every=every)


def test_local_steps_of_a_named_optimizer_have_something_to_send():
    like = jax.ShapeDtypeStruct((64, 64), "float32")
    (row,) = (r for r in _candidates.candidates(like, 4) if r.every > 1 and r.optimizer is not None)
    tx, params = row.transformation("data"), jnp.zeros((64, 64))
    state, update = tx.init(params), jax.jit(_alone.alone(tx.update, {"data": 4}))
    for _ in range(row.every):
        _, state = update(jnp.ones((64, 64)), state, params)
    assert jnp.any(optax.tree.get(state, "anchor") != 0)


def test_a_momentum_of_sgd_has_its_place_in_the_line():
    mine = functools.partial(fg.optimizers.feedback_sgd, momentum=0.5)
    row = fg.planning.Candidate("mine", fg.methods.top_k(0.1), optimizer=mine)
    made = eval(row.code("data"), {"fg": fg, "learning_rate": 0.1})
    assert made.init(jnp.zeros(9))[1] is not None
