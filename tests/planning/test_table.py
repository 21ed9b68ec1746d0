"""A plan that times nothing: codec times from a table, and which of them a line stands for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fftgrad as fg
from fftgrad.planning import _table
from fftgrad.planning._inputs import Groups, squares

LINK = fg.planning.Link("1gbit", "100us")
MOST = 1 << 22


@pytest.fixture
def same_machine(monkeypatch):
    """A copy takes as long here as on the machine of the table."""
    monkeypatch.setattr(_table, "copy_seconds", lambda: _table.load_table()["copy_seconds"])


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(_table, "time_exchange", lambda *_, **__: pytest.fail("it was timed"))


def timings(values, workers=16, joined=1):
    like = squares(values)
    rows = fg.planning.candidates(like, workers, joined)
    sizes = {"slow": workers, "fast": joined} if joined > 1 else {"data": workers}
    groups = Groups(sizes, "data", LINK if joined > 1 else None)
    return _table.from_table(rows, like, groups)[0]


def test_all_that_a_plan_compares_is_in_the_table():
    names = [row.name for row in fg.planning.candidates(squares(1 << 20), 8)]
    assert sorted(names) == sorted(_table.load_table()["rows"])
    assert "cores" in _table.load_table()["machine"]


@pytest.mark.usefixtures("same_machine")
def test_at_a_size_that_was_timed_it_is_the_time():
    found = timings(MOST)
    for name, points in _table.load_table()["rows"].items():
        (point,) = (p for p in points if p.values == MOST)
        extra = 0.0
        if "Muon" in name:
            every = 4 if "local" in name else 1
            extra = every * _table.orthogonalizing(squares(MOST))
            extra += _table.turning(squares(MOST)) if "eigenbasis" in name else 0.0
            extra /= _table.load_table()["muon_flops_per_second"]
        assert found[name].compress == pytest.approx(point.compress, rel=1e-4), name
        assert found[name].decompress == pytest.approx(point.decompress + extra, rel=1e-4), name


@pytest.mark.usefixtures("same_machine")
def test_beyond_it_grows_with_the_values_and_with_the_workers():
    for name, timing in timings(10 * MOST).items():
        if "Muon" not in name:
            assert timing == pytest.approx(np.multiply(10, timings(MOST)[name])), name
    few, many = timings(MOST, 4), timings(MOST, 64)
    gathered = "top-k 4 %, 4 bits"
    assert few[gathered].decompress < many[gathered].decompress
    assert all(few[name].decompress <= many[name].decompress for name in few)


@pytest.mark.usefixtures("same_machine")
def test_only_what_is_gathered_costs_more_with_more_workers():
    few, usual, many = timings(MOST, 2), timings(MOST, 16), timings(MOST, 1024)
    gathered = {name for name in usual if many[name].decompress > 1.01 * usual[name].decompress}
    rows = fg.planning.candidates(squares(MOST), 16)
    assert gathered == {r.name for r in rows if isinstance(r.recipe.exchange, fg.AllGather)}
    for name in gathered:
        assert 0 < few[name].decompress < usual[name].decompress
        assert few[name].compress == usual[name].compress


@pytest.mark.usefixtures("same_machine")
def test_behind_fast_links_each_has_a_piece():
    values, table = 8 * MOST, _table.load_table()
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
    found = fg.planning.plan(squares(values), step="300ms", link=LINK, workers=16)
    assert all(math.isfinite(row.seconds) for row in found.rows)
    assert _table.load_table()["machine"] in found.source
    assert found.source in " ".join(str(found).split())


@pytest.mark.usefixtures("untimed")
def test_two_levels_are_answered_too():
    fast = (8, fg.planning.Link("50GB/s", "10us"))
    found = fg.planning.plan(squares(30_000), step="300ms", link=LINK, workers=64, fast=fast)
    assert all(row.code.endswith("axis_name=('slow', 'fast'))") for row in found.rows)


def test_another_machine_is_as_much_slower_as_its_copies(monkeypatch):
    found = []
    for factor in (1.0, 3.0):
        known = factor * _table.load_table()["copy_seconds"]
        monkeypatch.setattr(_table, "copy_seconds", lambda known=known: known)
        found.append(timings(MOST)["QSGD 4 bits"])
    assert found[1].compress == pytest.approx(3 * found[0].compress)


ROWS = [
    fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
    fg.planning.Candidate("signs", fg.AllGather(fg.Sign()), loss="close"),
]


def test_rows_of_ones_own_are_timed_small_and_in_proportion(monkeypatch):
    sizes = []

    def time_exchange(_, like, *__, **___):
        values = sum(leaf.size for leaf in jax.tree.leaves(like))
        sizes.append(values)
        return fg.planning.Timing(1e-9 * values, 2e-9 * values)

    monkeypatch.setattr(_table, "time_exchange", time_exchange)
    like, heard = {"w": jax.ShapeDtypeStruct((40_000, 10_000), "float32")}, []
    known = {"step": "1s", "link": LINK, "workers": 16, "rows": ROWS, "tell": heard.append}
    found = fg.planning.plan(like, **known)
    assert heard == ["dense", "signs"]
    assert max(sizes) < 1.01 * _table.LARGEST
    (signs,) = (row for row in found.rows if row.name == "signs")
    assert signs.parts.compress == pytest.approx(0.4, rel=0.01)
    assert signs.parts.decompress == pytest.approx(0.8, rel=0.01)
    assert "in proportion" in found.source
    sizes.clear()
    fg.planning.plan(like, **known, measure=True)
    assert set(sizes) == {400_000_000}
