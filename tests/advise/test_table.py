"""A plan that times nothing: codec times from a table, and which of them a line stands for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fftgrad as fg
from fftgrad.advise import _exchange, _measure, _memory, _period, _table
from fftgrad.advise._inputs import Groups
from fftgrad.advise.commands._plan import squares

LINK = fg.advise.Link("1gbit", "100us")
MOST = 1 << 22


@pytest.fixture
def same_machine(monkeypatch):
    """A copy takes as long here as on the machine of the table."""
    monkeypatch.setattr(_table, "copy_seconds", lambda: _table.load()["copy_seconds"])


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(_exchange, "timing_of", lambda *_, **__: pytest.fail("it was timed"))


def timings(values, workers=16, joined=1):
    like = squares(values)
    rows = fg.advise.candidates(like, workers, joined)
    sizes = {"slow": workers, "fast": joined} if joined > 1 else {"data": workers}
    groups = Groups(sizes, "data", LINK if joined > 1 else None)
    return _table.timings(rows, like, groups)[0]


def test_all_that_a_plan_compares_is_in_the_table():
    names = [row.name for row in fg.advise.candidates(squares(1 << 20), 8)]
    assert sorted(names) == sorted(_table.load()["rows"])
    assert "cores" in _table.load()["machine"]


@pytest.mark.usefixtures("same_machine")
def test_at_a_size_that_was_timed_it_is_the_time():
    found = timings(MOST)
    for name, points in _table.load()["rows"].items():
        (point,) = (p for p in points if p.values == MOST)
        extra = 0.0
        if "Muon" in name:
            every = 4 if "local" in name else 1
            extra = every * _table.orthogonalizing(squares(MOST))
            extra += _table.turning(squares(MOST)) if "eigenbasis" in name else 0.0
            extra /= _table.load()["muon_flops_per_second"]
        assert found[name].compress == pytest.approx(point.compress, rel=1e-4), name
        assert found[name].decompress == pytest.approx(point.decompress + extra, rel=1e-4), name


@pytest.mark.usefixtures("same_machine")
def test_beyond_it_grows_with_the_values_and_with_the_workers():
    for name, timing in timings(10 * MOST).items():
        if "Muon" not in name:
            assert timing[:2] == pytest.approx(np.multiply(10, timings(MOST)[name][:2])), name
    few, many = timings(MOST, 4), timings(MOST, 64)
    gathered = "top-k 4 %, 4 bits"
    assert few[gathered].decompress < many[gathered].decompress
    assert all(few[name].decompress <= many[name].decompress for name in few)


@pytest.mark.usefixtures("same_machine")
def test_only_what_is_gathered_costs_more_with_more_workers():
    few, usual, many = timings(MOST, 2), timings(MOST, 16), timings(MOST, 1024)
    gathered = {name for name in usual if many[name].decompress > 1.01 * usual[name].decompress}
    rows = fg.advise.candidates(squares(MOST), 16)
    assert gathered == {r.name for r in rows if isinstance(r.recipe.exchange, fg.AllGather)}
    for name in gathered:
        assert 0 < few[name].decompress < usual[name].decompress
        assert few[name].compress == usual[name].compress


@pytest.mark.usefixtures("same_machine")
def test_behind_fast_links_each_has_a_piece():
    values, table = 8 * MOST, _table.load()
    whole, pieces = timings(MOST), timings(values, 16, 8)
    passes = _table.PASSES * table["copy_seconds"] * values / _table.COPY_VALUES
    for name in ("QSGD 4 bits", "top-k 4 %, 4 bits"):
        assert pieces[name].compress == pytest.approx(whole[name].compress)
        assert pieces[name].decompress == pytest.approx(whole[name].decompress + passes)


def test_muon_is_charged_for_the_shapes_of_its_matrices():
    square, flat = jnp.zeros((64, 64)), jnp.zeros((4, 1024))
    assert _table.orthogonalizing({"a": square}) == 5 * 6 * 64**3
    assert _table.orthogonalizing({"a": flat, "b": jnp.zeros(9)}) == 5 * (4 * 16 * 1024 + 2 * 64)


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("values", [30_000, 1_300_000_000])
def test_any_size_is_answered_without_timing_anything(values):
    found = fg.advise.plan(squares(values), step="300ms", link=LINK, workers=16)
    assert {row.name for row in found.rows} == {*found.measured.timings}
    assert all(math.isfinite(row.seconds) and row.compile > 0 for row in found.rows)
    assert _table.load()["machine"] in found.source
    assert found.source in " ".join(str(found).split())
    by_name = {row.name: row for row in found.rows}
    assert by_name["QSGD 4 bits"].memory < 1000  # counters
    assert by_name["signs, two stages"].memory > 4 * values


@pytest.mark.usefixtures("untimed")
def test_two_levels_are_answered_too():
    fast = (8, fg.advise.Link("50GB/s", "10us"))
    found = fg.advise.plan(squares(30_000), step="300ms", link=LINK, workers=64, fast=fast)
    assert found.measured.timings["dense float32"].workers == (8, 8)


def test_another_machine_is_as_much_slower_as_its_copies(monkeypatch):
    ours = timings(MOST)["QSGD 4 bits"]
    found = []
    for factor in (1.0, 3.0):
        known = factor * _table.load()["copy_seconds"]
        monkeypatch.setattr(_table, "copy_seconds", lambda known=known: known)
        found.append(timings(MOST)["QSGD 4 bits"])
    assert found[1].compress == pytest.approx(3 * found[0].compress)
    assert ours.compile == found[1].compile


ROWS = [
    fg.advise.Candidate("dense", fg.AllReduce(), dense=True),
    fg.advise.Candidate("signs", fg.AllGather(fg.Sign()), loss="close"),
]


def test_rows_of_ones_own_are_timed_small_and_a_line_says_the_rest(monkeypatch):
    sizes = []

    def timing_of(*args, **_):
        values = sum(leaf.size for leaf in jax.tree.leaves(args[2]))
        sizes.append(values)
        return fg.advise.Timing(1e-3 + 1e-9 * values, 2e-9 * values, (16,))

    monkeypatch.setattr(_exchange, "timing_of", timing_of)
    like = {"w": jax.ShapeDtypeStruct((40_000, 10_000), "float32")}
    found = fg.advise.plan(like, step="1s", link=LINK, workers=16, rows=ROWS)
    assert max(sizes) < 1.01 * MOST
    assert len(set(sizes)) == 2
    assert found.measured.timings["signs"].compress == pytest.approx(1e-3 + 0.4)
    assert found.measured.timings["signs"].decompress == pytest.approx(0.8)
    assert "line" in found.source
    sizes.clear()
    fg.advise.plan(like, step="1s", link=LINK, workers=16, rows=ROWS, measure=True)
    assert set(sizes) == {400_000_000}


def test_smaller_models_have_matrices_of_the_same_form():
    like = {"w": jax.ShapeDtypeStruct((40_000, 10_000), "float32"), "b": jnp.zeros(100_000)}
    for small, values in zip(_measure._sizes(like), _measure.LINE, strict=True):
        assert sum(leaf.size for leaf in small.values()) == pytest.approx(values, rel=0.01)
        assert small["w"].shape[0] / small["w"].shape[1] == pytest.approx(4, rel=0.01)
    for shape in ((1, 400_000_000), (1, 1, 1, 400_000_000)):
        flat = _measure._sizes(jax.ShapeDtypeStruct(shape, "float32"))
        assert [leaf.size for leaf in flat] == [*_measure.LINE]


def test_times_that_fall_are_no_line():
    like = jax.ShapeDtypeStruct((400_000_000,), "float32")
    took = [fg.advise.Timing(0.3, 0.1), fg.advise.Timing(0.2, 0.2)]
    found = _measure._line(took, _measure._sizes(like), like)
    assert found.compress == 0.2
    assert found.decompress > 3


@pytest.mark.usefixtures("untimed")
def test_what_does_not_fit_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(_memory, "available", lambda: 10**9)
    like = jax.ShapeDtypeStruct((1_300_000_000,), "float32")
    said = r"1,300,000,000 values, which take 15.6 GB.*1 are free; leave measure out, or time"
    with pytest.raises(ValueError, match=said):
        fg.advise.plan(like, step="1s", link=LINK, workers=16, measure=True)
    with pytest.raises(ValueError, match=r"measure\(params\): must fit .*; time it on a larger"):
        fg.advise.measure(like, step="1s", link=LINK, workers=16)
    assert fg.advise.measure(like, step="1s", link=LINK, workers=16, rows=[]).step == 1.0


def test_what_a_program_needs_is_compared_with_what_is_free(monkeypatch):
    tx = fg.compressed_pmean(fg.AllGather(fg.Sign()), axis_name="data")
    like = jnp.zeros(100_000)
    monkeypatch.setattr(_memory, "available", lambda: 500_000)
    monkeypatch.setattr(_exchange, "inputs_like", lambda _: pytest.fail("it was made"))
    with pytest.raises(ValueError, match=r"time_exchange\(params\): must fit"):
        fg.advise.time_exchange(tx, like, {"data": 4}, seconds=0.01)


def test_what_is_updated_in_place_counts_once(monkeypatch):
    """Arguments and results share memory; the second gradient is beside them."""
    state = jnp.zeros(1000)
    like = jax.ShapeDtypeStruct((1000,), "float32")
    program = jax.jit(lambda g, s: s + g, donate_argnums=1).lower(like, state).compile()
    for free, fits in ((12_000, True), (11_999, False)):
        monkeypatch.setattr(_memory, "available", lambda free=free: free)
        if fits:
            _memory.check("plan", program, like)
        else:
            with pytest.raises(ValueError, match="must fit"):
                _memory.check("plan", program, like)


def test_what_is_free_is_known_here():
    free = _memory.available()
    assert free is None or 0 < free < 2**50


def local(**options):
    return fg.optimizers.diloco(
        optax.identity(), optax.sgd(1.0), 6, fg.AllReduce(), axis_name="data", **options
    )


@pytest.mark.parametrize(
    ("tx", "steps"),
    [
        (fg.compressed_pmean(fg.AllReduce(), axis_name="data"), 1),
        (local(), 6),
        (optax.chain(local(fragments=2), optax.scale(1.0)), 3),
        (local(fragments=3, delay=1), 2),
        (local(fragments=6, delay=1), 1),
    ],
    ids=["every step", "local steps", "chain", "delay", "streamed"],
)
def test_the_steps_to_an_exchange_are_those_of_the_chain(tx, steps):
    like = jax.ShapeDtypeStruct((8, 6), "float32")
    assert _period.period("predict_step", tx, like, {"data": 2}, None) == steps
    assert _period.period("predict_step", tx, like, {"data": 2}, steps) == steps


def sometimes(condition, first=False):
    """Sends by a condition on its counter; of the branches the first or the second sends."""

    def update(updates, state, params=None):
        del params
        both = (lambda x: x, lambda x: jax.lax.pmean(x, "data"))
        one, other = both[::-1] if first else both
        return jax.lax.cond(condition(state), other, one, updates), state + 1

    return optax.GradientTransformation(lambda _: jnp.int32(0), update)


def test_other_conditions_are_those_of_the_chain_or_not_known():
    like = jax.ShapeDtypeStruct((8, 6), "float32")
    period = lambda tx, given=None: _period.period("x", tx, like, {"data": 2}, given)  # noqa: E731
    assert period(sometimes(lambda step: step % 5 == 0)) == 5
    assert period(sometimes(lambda step: step % 5 != 0, first=True)) == 5
    assert period(sometimes(lambda step: step % 5000 == 0)) == 5000
    unknown = {
        "by the worker": sometimes(lambda _: jax.lax.axis_index("data") == 0),
        "counted elsewhere": optax.MultiSteps(
            fg.compressed_pmean(fg.AllReduce(), axis_name="data"), 4
        ).gradient_transformation(),
        "inside": optax.apply_if_finite(local(), 3),
    }
    for name, tx in unknown.items():
        assert period(tx, 4) == 4, name
    always = optax.chain(sometimes(lambda step: step < 3), sometimes(lambda step: step > 3))
    assert period(always, 7) == 7


def test_other_steps_to_an_exchange_are_refused_unless_it_is_streamed():
    like = jax.ShapeDtypeStruct((8, 6), "float32")
    plain = fg.compressed_pmean(fg.AllReduce(), axis_name="data")
    with pytest.raises(ValueError, match=r"predict_step\(every\): must be 1.*got 8"):
        fg.advise.predict_step(plain, like, step=1.0, link=LINK, axes={"data": 2}, every=8)
    with pytest.raises(ValueError, match=r"time_exchange\(every\): must be 6.*got 3"):
        fg.advise.time_exchange(local(), like, {"data": 2}, every=3)
    assert _period.period("predict_step", local(fragments=6), like, {"data": 2}, 6) == 6
