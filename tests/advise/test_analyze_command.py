"""The command: tables of 80 columns, JSON, figures, and what it says when something is wrong."""

import argparse
import io
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.advise import _rates
from fftgrad.advise.commands import _analyze, _draw

N = 8192
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Two steps of two workers."""
    path = tmp_path_factory.mktemp("gradients") / "gradients.npz"
    common = RNG.standard_t(3, N)
    trees = [
        {
            "layers": [{"a long name of a kernel that goes [/] on": common + RNG.normal(size=N)}],
            "bias": RNG.normal(size=100),
        }
        for _ in range(4)
    ]
    steps = {3: dict(enumerate(trees[:2])), 5: dict(enumerate(trees[2:]))}
    fg.advise.save_gradients(path, fg.advise.GradientLog(steps))
    return path


RATES = (
    fg.advise.Rate(fg.Budget(ratio=30), 30, 1.07, 0.24, 1.15),
    fg.advise.Rate(fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=4)), 30, 1.07, 0.33, 0.75),
    fg.advise.Rate(fg.Sign(), 30, 1.0, 0.9, 0.004),
)


@pytest.fixture(autouse=True)
def _codecs_are_known(monkeypatch):
    """To measure them takes most of a minute."""
    monkeypatch.setattr(_rates, "measured", lambda *_: RATES)


def run(*arguments):
    """What a command prints."""
    parser = argparse.ArgumentParser(prog="fftgrad analyze")
    _analyze.add_arguments(parser)
    out = io.StringIO()
    _analyze.run(parser.parse_args([*map(str, arguments)]), Console(file=out, width=80))
    return out.getvalue()


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_it_shows_tables_and_writes_what_it_is_asked_for(gradients, tmp_path):
    out = run(gradients, "--json", tmp_path / "a.json", "--figures", tmp_path / "figures")
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"\b(nan|inf)\b", out)
    back = json.loads((tmp_path / "a.json").read_text())
    for basis, errors in back["whole"]["dropped"].items():
        assert re.search(rf"{basis} +{errors[0]:.3f} +{errors[1]:.3f} +{errors[2]:.3f}", out)
    assert "steps 3, 5; workers 0, 1" in out
    for rate in RATES:
        row = f"{re.escape(repr(rate.codec))} +{rate.bits:.3g} +{rate.error:.3f} +{rate.bound:.3g}"
        assert re.search(row, out)
    assert "two workers, one step" in out
    assert "one worker, steps 3 and 5" in out
    assert "…" in out
    said = " ".join(out[out.index("Recommendation") :].split())
    assert all(sentence in said for sentence in back["recommendation"])
    assert said.endswith(back["recommendation"][-1])
    figures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert figures == ["compaction.png", "rate_distortion.png", "spectrum.png"]
    for name in figures:
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")


def test_a_leaf_of_less_than_a_block_has_no_curve_of_its_spectrum():
    """Which 100 biases would have, and would set the scale for all."""
    axes = Figure().subplots()
    leaves = {f"w{i}": RNG.normal(size=N) for i in range(7)} | {"bias": 1e3 * np.ones(100)}
    found = fg.advise.analyze(leaves, ratios=())
    _draw._spectrum(found, axes)
    curves = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert len(curves) == 5
    assert "all" in curves
    assert not any("small" in name for name in curves)
    assert all(len(found.whole.spectrum) == len(curve) for curve in curves.values())


def test_each_point_of_the_rates_names_its_codec(gradients):
    axes = Figure().subplots()
    found = fg.advise.analyze(fg.advise.load_gradients(gradients), ratios=())
    _draw._rates(found._replace(rates=RATES), axes)
    shown = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert shown.pop("ideal coder of the values")
    assert shown == {
        "Budget": [[1.07, 0.24]],
        "Sign": [[1.0, 0.9]],
        "TopK, LogLevels": [[1.07, 0.33]],
    }
    known = {line.get_color() for line in axes.get_lines()}
    assert len(known) == 4


def test_few_bases_are_drawn_and_no_basis_always(gradients):
    axes = Figure().subplots()
    found = fg.advise.analyze(fg.advise.load_gradients(gradients), ratios=())
    _draw._compaction(found, axes)
    names = [line.get_label() for line in axes.get_lines()]
    assert names[0] == "none"
    assert names[1] == min(
        (n for n in found.whole.dropped if n != "none"), key=lambda n: found.whole.dropped[n][1]
    )
    assert len(names) == 5


def test_json_on_standard_output_is_all_there_is(gradients):
    out = run(gradients, "--json", "-", "--max-values", 4 * 4096)
    found = json.loads(out)
    assert (found["values"], found["sampled"]) == (N + 100, 4096)


def test_of_a_plain_array_there_is_no_table_of_leaves_or_workers(tmp_path):
    np.save(tmp_path / "a.npy", RNG.normal(size=N).astype(np.float32))
    out = run(tmp_path / "a.npy")
    assert "Leaves" not in out
    assert "In common" not in out


def test_plain_files_are_of_workers_or_steps_as_it_is_said(tmp_path, capsys):
    files = [str(tmp_path / f"{i}.npy") for i in range(3)]
    for file in files:
        np.save(file, RNG.normal(size=N).astype(np.float32))
    assert main(["analyze", *files]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"analyze: {files[1]}: must have gradients that the files before it do not" in line
    assert line.endswith("say --each worker for files of a worker each, or --each step.")
    for each, steps, workers in (("worker", [0], [0, 1, 2]), ("step", [0, 1, 2], [0])):
        found = json.loads(run(*files, "--each", each, "--json", "-"))
        assert found["steps"] == steps
        assert found["workers"] == workers
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", *files, "--each", "day"])


def test_dtypes_that_numpy_does_not_name_are_read(tmp_path):
    values = RNG.normal(size=N).astype(jnp.bfloat16)
    np.savez(tmp_path / "a.npz", w=values, steps=np.arange(3))
    out = run(tmp_path / "a.npz", "--json", "-")
    assert json.loads(out)["values"] == N


def test_what_is_wrong_is_said_in_a_line(tmp_path, capsys, monkeypatch, gradients):
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", str(tmp_path / "nowhere.npz")])
    assert "nowhere.npz" in capsys.readouterr().err
    np.save(tmp_path / "zeros.npy", np.zeros(9))
    assert main(["analyze", str(tmp_path / "zeros.npy")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "only zeros" in err
    assert err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", str(gradients), "--figures", str(tmp_path / "zeros.npy")])
    assert "must be a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", str(gradients), "--figures", str(tmp_path / "zeros.npy" / "in it")])
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["analyze", str(gradients), "--figures", str(tmp_path)]) == 2
    assert ".[cli]" in capsys.readouterr().err


def test_it_has_a_line_of_help_and_examples():
    assert "\n" not in _analyze.HELP
    assert "fftgrad analyze" in _analyze.EPILOG
