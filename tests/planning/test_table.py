"""A plan that times nothing: codec times from the tables, scaled to the figures of a device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fftgrad as fg
from fftgrad.planning import _candidates, _commands, _devices, _plan, _predict, _timing
from fftgrad.planning._predict import Groups

LINK = fg.planning.Link("1gbit", "100us")
MOST = 1 << 22


def squares(values):
    """A model of 16 square matrices, as the table was measured with."""
    side = math.isqrt(values // 16)
    like = {f"matrix{i}": jax.ShapeDtypeStruct((side, side), "float32") for i in range(16)}
    rest = values - 16 * side**2
    return like | ({"vector": jax.ShapeDtypeStruct((rest,), "float32")} if rest else {})


@pytest.fixture
def untimed(monkeypatch):
    """A plan has few rows, and times none."""
    usual = _candidates.candidates
    monkeypatch.setattr(_plan, "candidates", lambda *given: usual(*given)[::4])
    monkeypatch.setattr(_timing, "time_exchange", lambda *_, **__: pytest.fail("it was timed"))


def timings(values, workers=16, joined=1, device="this"):
    like = squares(values)
    rows = fg.planning.candidates(like, workers, joined)
    groups = Groups(workers, joined, LINK if joined > 1 else None)
    return _devices.from_table(rows, like, groups, _devices.find(device))[0]


def test_all_that_a_plan_compares_is_in_the_table():
    names = [row.name for row in fg.planning.candidates(squares(1 << 20), 8)]
    for table in ("timings", "programs"):
        assert sorted(names) == sorted(_devices.load_table(table)["rows"])


def test_at_a_size_that_was_timed_it_is_the_time_and_beyond_it_grows_with_the_values():
    found = timings(MOST)
    for name, points in _devices.load_table()["rows"].items():
        (point,) = (p for p in points if p.values == MOST)
        flops = _devices.turning(squares(MOST)) if "eigenbasis" in name else 0.0
        extra = flops / _devices.find("this").flops_per_second
        assert found[name].compress == pytest.approx(point.compress, rel=1e-4), name
        assert found[name].decompress == pytest.approx(point.decompress + extra, rel=1e-4), name
        assert (found[name].muon > 0) == ("Muon" in name)
    for name, timing in timings(10 * MOST).items():
        if "Muon" not in name:
            assert timing == pytest.approx(np.multiply(10, found[name])), name


def test_only_what_is_gathered_costs_more_with_more_workers():
    few, usual, many = timings(MOST, 2), timings(MOST, 16), timings(MOST, 1024)
    gathered = {name for name in usual if many[name].decompress > 1.01 * usual[name].decompress}
    rows = fg.planning.candidates(squares(MOST), 16)
    assert gathered == {r.name for r in rows if isinstance(r.recipe.exchange, fg.AllGather)}
    for name in gathered:
        assert 0 < few[name].decompress < usual[name].decompress
        assert few[name].compress == usual[name].compress


def test_behind_fast_links_each_has_a_piece():
    values, table = 8 * MOST, _devices.load_table()
    whole, pieces = timings(MOST), timings(values, 16, 8)
    passes = _devices.PASSES / 2 * table["copy_seconds"] * values / _devices.COPY_VALUES
    for name in ("QSGD 4 bits", "top-k 4 %, 4 bits"):
        assert pieces[name].compress == pytest.approx(whole[name].compress)
        assert pieces[name].decompress == pytest.approx(whole[name].decompress + passes)


def test_muon_is_charged_for_the_shapes_of_its_matrices():
    square, flat = jnp.zeros((64, 64)), jnp.zeros((4, 1024))
    assert _devices.orthogonalizing({"a": square}) == 5 * 6 * 64**3
    assert _devices.orthogonalizing({"a": flat, "b": jnp.zeros(9)}) == 5 * (4 * 16 * 1024 + 2 * 64)
    model = _commands.model(*_commands.MODELS["llama:134M"])  # not its embeddings
    assert _devices.orthogonalizing(model) == _devices.orthogonalizing(model["layers"])


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("values", [30_000, 1_300_000_000])
def test_any_size_is_answered_without_timing_anything(values):
    found = fg.planning.plan(squares(values), step="300ms", link=LINK, workers=16)
    assert all(math.isfinite(row.seconds) for row in found.rows)
    assert _devices.load_table()["machine"] in found.source
    assert found.source in " ".join(str(found).split())
    fast = (8, fg.planning.Link("50GB/s", "10us"))
    found = fg.planning.plan(squares(values), step="300ms", link=LINK, workers=64, fast=fast)
    assert all(row.code.endswith("axis_name=('slow', 'fast'))") for row in found.rows)


def test_another_machine_is_as_much_slower_as_its_copies(monkeypatch):
    fast, same = timings(MOST)["QSGD 4 bits"], _devices.find("this")
    slower = same._replace(bytes_per_second=same.bytes_per_second / 3)
    monkeypatch.setattr(_devices, "measured", lambda: slower)
    _devices.measure()
    assert timings(MOST)["QSGD 4 bits"].compress == pytest.approx(3 * fast.compress)


def test_a_machine_is_measured_once_and_its_file_is_a_device(monkeypatch, tmp_path):
    first = _devices.find("this")
    monkeypatch.setattr(_devices, "measured", lambda: pytest.fail("it was measured again"))
    assert _devices.find("this") == first
    copied = tmp_path / "there.json"
    copied.write_text(_devices.kept().read_text())
    assert _devices.find(copied) == first
    with pytest.raises(ValueError, match="run `fftgrad bench` on the device"):
        _devices.find(__file__)
    monkeypatch.setattr(_devices.platform, "node", lambda: "elsewhere")
    assert not _devices.kept().exists()  # each host has a file of its own


@pytest.mark.parametrize("device", sorted(_devices.KNOWN))
@pytest.mark.parametrize("model", ["llama:134M", "llama:7B"])
@pytest.mark.usefixtures("untimed")
def test_a_plan_for_an_accelerator_is_made_without_it(monkeypatch, device, model):
    monkeypatch.setattr(_devices, "measured", lambda: pytest.fail("this machine was measured"))
    like = _commands.model(*_commands.MODELS[model])
    known = {"step": "1s", "link": LINK, "workers": 16, "device": device}
    found = fg.planning.plan(like, **known)
    assert found == fg.planning.plan(like, **known)
    assert _devices.KNOWN[device].name in found.source


def test_an_accelerator_takes_less_the_more_it_moves_and_multiplies():
    h100, a100, l40s = (timings(MOST, device=name) for name in ("h100", "a100", "l40s"))
    for name, fast in h100.items():
        assert sum(fast) < sum(a100[name]) < sum(l40s[name]), name
        assert all(part >= 0 for part in fast)
    for workers in (2, 1024):
        few, many = (timings(size, workers, device="h100") for size in (MOST, 100 * MOST))
        for name, row in few.items():
            if name in many:  # an eigenbasis has no sides as long as those of the large one
                assert 0 < sum(row) < sum(many[name]), name


def test_a_tpu_moves_more_bytes_and_a_gather_decodes_all():
    for row in fg.planning.candidates(squares(1000), 16):
        if row.name in ("QSGD 4 bits", "signs, two stages"):
            plain = _devices.KNOWN["h100"]._replace(launch=0.0)
            counted = [
                sum(_devices._counted(row, MOST, workers, device))
                for workers, device in ((16, plain), (16, plain._replace(passes=12.0)))
            ]
            assert counted[1] == pytest.approx(12 * counted[0])
            own, twice = (_devices._counted(row, MOST, workers, plain)[1] for workers in (16, 32))
            assert twice == pytest.approx((2 if row.name == "QSGD 4 bits" else 1) * own)


def test_an_eigenbasis_turns_short_sides_only_and_low_ranks_are_for_matrices():
    short, long = jnp.zeros((8, 4)), jnp.zeros((2048, 4096))
    assert _devices.turning({"a": short}) == 8 * 32 * 12 + 8**3 + 4**3
    assert _devices.turning({"a": long}) == 0
    some = {"eigenbasis 50x, Muon", "PowerSGD rank 4", "ACP-SGD rank 4"}
    for like, lacks in ((short, set()), (long, {"eigenbasis 50x, Muon"}), (jnp.zeros(99), some)):
        assert some - {row.name for row in fg.planning.candidates(like, 8)} == lacks


# The shapes of models


@pytest.mark.parametrize("name", _commands.MODELS)
def test_a_named_model_has_about_as_many_parameters_as_its_name_says(name):
    said, model = float(name[6:-1]) * {"M": 1e6, "B": 1e9}[name[-1]], _commands.MODELS[name]
    assert _predict.count(_commands.model(*model)) == pytest.approx(said, rel=0.08)


def test_rows_of_ones_own_are_timed_for_the_whole_model(monkeypatch):
    def time_exchange(_, like, *__, **___):
        values = sum(leaf.size for leaf in jax.tree.leaves(like))
        return fg.planning.Timing(1e-9 * values, 2e-9 * values)

    monkeypatch.setattr(_timing, "time_exchange", time_exchange)
    like, heard = {"w": jax.ShapeDtypeStruct((40_000, 10_000), "float32")}, []
    rows = [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
        fg.planning.Candidate("signs", fg.AllGather(fg.Sign()), loss="close"),
    ]
    known = {"step": "1s", "link": LINK, "workers": 16, "rows": rows, "tell": heard.append}
    found = fg.planning.plan(like, **known)
    assert heard == ["dense", "signs"]
    (signs,) = (row for row in found.rows if row.name == "signs")
    assert signs.parts.compress == pytest.approx(0.4, rel=0.01)
    assert signs.parts.decompress == pytest.approx(0.8, rel=0.01)
    assert found.source == "Codec times: measured here."
    with pytest.raises(ValueError, match="pass timings"):
        fg.planning.plan(like, device="h100", **known)
