"""`fftgrad bench`: what it reports agrees with itself and with the library."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.planning.commands import _bench
from fftgrad.planning.commands._bench import CODECS, heavy_tailed, inputs_of, time_codecs


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def strictly(text):
    """What JSON says, which has no NaN and no infinity."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a small run."""
    folder = tmp_path_factory.mktemp("bench")
    assert main(["bench", "--smoke", f"--json={folder / 'report.json'}"]) == 0
    return strictly((folder / "report.json").read_text())


def test_the_report_says_what_it_was_made_on(report):
    found = report
    assert found["versions"]["jax"] == jax.__version__
    assert set(found["versions"]) == {"python", "fftgrad", "jax", "jaxlib", "optax", "numpy"}
    assert (found["platform"], found["devices"]) == ("cpu", jax.device_count())
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28


def test_the_rows_agree_with_the_library_and_with_themselves(report):
    found = report
    (size,) = found["sizes"]
    like = jax.ShapeDtypeStruct((size["values"],), jnp.float32)
    for row in size["codecs"]:
        codec = CODECS[row["name"]]
        assert row["codec"] == repr(codec)
        assert row["wire_bytes"] == fg.wire_bytes(codec, like)
        both = row["compress"]["seconds"] + row["decompress"]["seconds"]
        assert row["ratio"] == 4 * like.size / row["wire_bytes"]
        np.testing.assert_allclose(row["copies"], both / size["copy"]["seconds"])
        # Over a link of this speed, the time that the bytes save is what the codec takes.
        saved = (4 * like.size - row["wire_bytes"]) / row["pays_below"]
        np.testing.assert_allclose(saved, both)
        for time in (row["compress"], row["decompress"], size["copy"]):
            assert 0 < time["least"] <= time["seconds"] <= time["most"]
            assert time["rounds"] >= 3


def test_several_devices_are_timed_together(report):
    found = report
    assert [one["values"] for one in found["all_reduce"]] == [2**8, 2**12, 2**16]
    assert {one["devices"] for one in found["all_reduce"]} == {jax.device_count()}
    assert all(one["time"]["least"] > 0 for one in found["all_reduce"])


def test_every_codec_runs_and_its_table_fits(monkeypatch, capsys):
    found = time_codecs(heavy_tailed(2**12), list(CODECS), 0.01)
    assert [row.name for row in found.codecs] == list(CODECS)
    monkeypatch.setattr(_bench, "time_codecs", lambda *_: found)
    monkeypatch.setattr(_bench, "time_collectives", lambda *_: ())
    assert main(["bench", "--sizes", "4Ki"]) == 0
    out = capsys.readouterr().out
    assert "copies" in out
    assert_rows(out.splitlines(), 80)


def assert_rows(lines, width):
    """Each codec has one line, with its whole name and the bandwidth at its end."""
    assert max(map(len, lines)) <= width
    for name in CODECS:
        (line,) = (line for line in lines if line.startswith(name + " "))
        assert line.rstrip().endswith("bit/s"), line


def test_what_is_longer_than_dense_never_pays(monkeypatch):
    """As a list of all values and their positions."""
    monkeypatch.setitem(CODECS, "all", fg.TopK(k=63))
    (row,) = time_codecs(heavy_tailed(64), ["all"], 0.0).codecs
    assert row.ratio < 1
    assert row.pays_below == 0.0


def test_inputs_are_as_gradients_are_and_differ():
    x = heavy_tailed(2**14)
    assert x.dtype == np.float32
    assert np.all(x != 0)
    assert np.isfinite(x).all()
    assert np.mean(x**4) > 6 * np.mean(x**2) ** 2  # 3 for a normal distribution
    assert np.corrcoef(x[1:], x[:-1])[0, 1] > 0.2
    (a, first), (b, second), (c, third) = inputs_of(x)
    assert len({np.asarray(one).tobytes() for one in (a, b, c)}) == 3
    keys = {jax.random.key_data(step.shared).tobytes() for step in (first, second, third)}
    assert len(keys) == 3
