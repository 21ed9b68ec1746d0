"""`fftgrad plan`: it hands on what it is asked, and says what the plan says."""

import gc
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad import planning
from fftgrad.__main__ import main
from fftgrad.planning import _candidates, plan
from fftgrad.planning.commands import _plan

ASKED = ["plan", "--workers=16", "--bandwidth=100mbit", "--step=30ms"]
ROWS = (
    fg.planning.Candidate("dense", fg.AllReduce(), dense=True, loss="as dense"),
    fg.planning.Candidate(
        "signs", fg.Recipe(fg.AllGather(fg.Sign()), fg.ErrorFeedback()), loss="close"
    ),
)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


SOME = {
    "dense float32", "dense bfloat16", "QSGD 4 bits", "two stages 25x, Muon",
    "signs, two stages", "4 local steps, signs", "8 local steps, signs",
}  # fmt: skip


def planned(link):
    """As if dense took no time here, and all others the same."""
    like = _plan.squares(250_000)
    rows = [row for row in _candidates.candidates(like, 16) if row.name in SOME]
    times = {True: fg.planning.Timing(0.0, 0.0), False: fg.planning.Timing(0.001, 0.002)}
    timings = {row.name: times[row.dense] for row in rows}
    return fg.planning.plan(
        like, step=0.03, link=link, workers=16, rows=rows, timings=timings, buckets=1,
        algorithm="ring",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pays():
    """A plan over a slow link, with errors."""
    found = planned("100mbit")
    return found._replace(rows=tuple(row._replace(error=0.5123) for row in found.rows))


@pytest.fixture(scope="module")
def does_not_pay():
    """The same over a fast link."""
    return planned("100gbit")


@pytest.fixture
def asked(monkeypatch, pays):
    """What the library is asked; `asked["answer"]` is the plan that it makes."""
    calls = {"answer": pays}

    def plan(params, **others):
        others.pop("tell")("a candidate")
        calls.update(others, params=params)
        return calls["answer"]

    monkeypatch.setattr(planning, "plan", plan)
    return calls


def test_what_is_asked_reaches_the_library(asked):
    assert main([*ASKED, "--parameters=25M", "--latency=2ms", "--buckets=4", "--seconds=0.1"]) == 0
    assert asked["link"] == fg.planning.Link("100mbit", "2ms")
    assert (asked["workers"], asked["step"]) == (16, 0.03)
    assert (asked["seconds"], asked["gradients"], asked["measure"]) == (0.1, None, False)
    assert (asked["buckets"], asked["algorithm"]) == (4, "fastest")
    assert (asked["fast"], asked["axis_name"]) == (None, None)
    assert main([*ASKED[:2], "--bandwidth=125MB/s", "--step=0.3s", "--parameters=1k"]) == 0
    assert asked["link"].bandwidth == 1.25e8
    assert asked["step"] == 0.3


@pytest.mark.usefixtures("asked")
def test_the_collector_of_garbage_is_as_it_was():
    assert gc.isenabled()
    main([*ASKED, "--parameters=1k"])
    assert gc.isenabled()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("columns", [40, 60, 120])
def test_prose_is_as_wide_as_the_terminal(monkeypatch, capsys, columns):
    """No line that was full before is broken again, and none ends in a space."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*ASKED, "--parameters=1k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Order: "))
    prose = lines[first:-2]
    assert max(map(len, prose)) <= columns
    assert not any(line.endswith(" ") for line in prose)
    for line, following in itertools.pairwise(prose):
        if line and following and not following.startswith(("Codec times", "measured")):
            assert len(line) + 1 + len(following.split()[0]) > columns, line


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.usefixtures("asked")
def test_a_wide_terminal_sees_what_it_keeps_and_how_long_it_compiles(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*ASKED, "--parameters=1k"]) == 0
    out = capsys.readouterr().out
    assert ("keeps" in out and "compiles" in out) == (columns == 100)
    assert "Codec times: as given." in out


def test_a_latency_of_100_us_is_usual(asked):
    assert main([*ASKED, "--parameters=1k"]) == 0
    assert asked["link"] == fg.planning.Link("100mbit", 1e-4)


def test_two_levels_the_algorithm_and_the_axis_reach_the_library(asked):
    levels = ["--fast=8", "--fast-bandwidth=50GB/s", "--fast-latency=20us"]
    assert main([*ASKED, "--parameters=1k", *levels, "--algorithm=tree"]) == 0
    assert asked["fast"] == (8, fg.planning.Link("50GB/s", "20us"))
    assert asked["algorithm"] == "tree"
    assert main([*ASKED, "--parameters=1k", *levels[:2], "--axis-name=node,gpu"]) == 0
    assert asked["fast"] == (8, fg.planning.Link("50GB/s", "10us"))
    assert asked["axis_name"] == ("node", "gpu")
    assert main([*ASKED, "--parameters=1k", "--axis-name=replica"]) == 0
    assert asked["axis_name"] == "replica"


@pytest.mark.parametrize("parameters", [1, 15, 16, 1000, 25_000_000, 2**31])
def test_square_matrices_have_as_many_parameters_as_are_asked_for(parameters):
    tree = _plan.squares(parameters)
    assert sum(leaf.size for leaf in tree.values()) == parameters
    assert all(leaf.ndim == 1 or leaf.shape[0] == leaf.shape[1] for leaf in tree.values())
    assert 0 not in [leaf.size for leaf in tree.values()]


def test_the_tree_is_that_of_the_files(asked, tmp_path):
    params, gradients = tmp_path / "params.npz", tmp_path / "gradients.npz"
    np.savez(params, w=values((3, 4)), b=values((4,)))
    np.savez(gradients, w=values((3, 4), 1), b=values((4,), 1))
    shapes = {"w": (3, 4), "b": (4,)}
    assert main([*ASKED, "--params", str(params), "--gradients", str(gradients)]) == 0
    assert asked["params"] == {
        name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()
    }
    (gradient,) = asked["gradients"]
    np.testing.assert_array_equal(gradient["w"], values((3, 4), 1))
    assert main([*ASKED, "--gradients", str(gradients)]) == 0
    assert jax.tree.map(jnp.shape, asked["params"]) == shapes


def test_a_file_of_several_steps_and_workers_is_one_model(asked, tmp_path):
    """And not so many times as many parameters."""
    tree = {"w": values((3, 4)), "b": values((4,))}
    captured = fg.planning.GradientLog({step: dict.fromkeys((0, 1, 2), tree) for step in (10, 100)})
    fg.planning.save_gradients(tmp_path / "gradients.npz", captured)
    assert main([*ASKED, "--gradients", str(tmp_path / "gradients.npz")]) == 0
    assert jax.tree.map(jnp.shape, asked["params"]) == {"w": (3, 4), "b": (4,)}
    assert len(asked["gradients"]) == _plan.SAMPLES
    np.testing.assert_array_equal(asked["gradients"][-1]["w"], tree["w"])


@pytest.mark.usefixtures("asked")
def test_the_answer_is_a_table_a_sentence_and_code(pays, capsys):
    assert main([*ASKED, "--parameters=25M", "--top=30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == pays.best.code  # as long as it is, on a line of its own
    assert max(map(len, lines[:-1])) <= 80
    flat = " ".join(" ".join(lines).split())
    assert f"{pays.best.speed_up:.3g} times the steps of the best dense: {pays.best.name}" in flat
    assert f"({min(pays.rows, key=lambda row: row.break_even is not None).name})" in flat
    assert f"Loss: {pays.best.loss}." in flat
    for row in pays.rows:
        assert row.name.split()[0] in flat
    for text in ("0.512", "3 ms", "any link", "never", "check", "Gbit/s"):
        assert text in flat, text


def test_steps_to_the_loss_are_told(asked, pays, capsys):
    best = pays.best._replace(steps=1.25, speed_up=2.0)
    asked["answer"] = pays._replace(rows=(best, *pays.rows[1:]))
    assert main([*ASKED, "--parameters=25M"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "it took 1.25 times the steps to dense's loss, which leaves 1.6 times" in out


def test_a_whole_optimizer_is_called_one(asked, pays, capsys):
    assert main([*ASKED, "--parameters=25M"]) == 0
    assert pays.best.whole
    said = "goes in place of your optimizer"
    assert said in " ".join(capsys.readouterr().out.split())
    asked["answer"] = pays._replace(rows=(pays.best._replace(whole=False), *pays.rows[1:]))
    assert main([*ASKED, "--parameters=25M"]) == 0
    assert said not in " ".join(capsys.readouterr().out.split())


def test_where_dense_is_best_it_says_so_and_that_is_no_failure(asked, does_not_pay, capsys):
    asked["answer"] = does_not_pay
    assert main([*ASKED, "--parameters=25M"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Do not compress: {does_not_pay.best.name} takes" in out
    assert "the fastest that compresses, 8 local steps, signs, takes" in out
    assert "(loss: check)" in out
    assert out.endswith(does_not_pay.best.code)


def test_a_gradient_that_is_too_small_to_matter_gets_no_table(asked, capsys):
    rows = [row for row in ROWS if row.dense or row.name == "signs"]
    timings = {row.name: fg.planning.Timing(0.0, 0.0) for row in rows}
    like = _plan.squares(3)
    asked["answer"] = plan(
        like, step="30ms", link="100mbit", workers=16, rows=rows, timings=timings, buckets=1
    )
    assert main([*ASKED, "--parameters=3"]) == 0
    out = capsys.readouterr().out
    assert "too small to matter" in " ".join(out.split())
    assert "signs" not in out
    assert len(out.splitlines()) <= 6
    assert out.strip().endswith(asked["answer"].best.code)


def test_a_faster_row_that_is_not_the_answer_has_a_reason(asked, does_not_pay, capsys):
    best, other = does_not_pay.best, next(r for r in does_not_pay.rows if r.break_even is not None)
    quick = other._replace(seconds=best.seconds * 0.95)
    for rows, said in (((best, quick), True), ((best, other), other.seconds < best.seconds)):
        asked["answer"] = does_not_pay._replace(rows=rows)
        assert main([*ASKED, "--parameters=25M"]) == 0
        assert ("have to be a tenth faster" in " ".join(capsys.readouterr().out.split())) == said


def test_what_codec_times_decide_is_said(asked, does_not_pay, capsys):
    """A codec that was timed on a CPU is no reason not to compress between GPUs."""
    best, other = does_not_pay.best, next(r for r in does_not_pay.rows if r.break_even is not None)
    step = best.seconds
    for loss, codec, said in (("close", 9 * step, True), ("check", 9 * step, False)):
        parts = other.parts._replace(compress=codec / 3, decompress=codec * 2 / 3)
        slow = other._replace(
            name="slow", loss=loss, steps=1.0, seconds=codec + step / 2, parts=parts
        )
        for row, told in ((slow, said), (slow._replace(seconds=codec + 2 * step), False)):
            asked["answer"] = does_not_pay._replace(rows=(best, row))
            assert main([*ASKED, "--parameters=25M"]) == 0
            out = " ".join(capsys.readouterr().out.split())
            assert ("Do not compress, if this CPU is what trains: " in out) == told
            assert ("of slow its codec and optimizer take" in out) == told


def test_local_steps_go_around_an_optimizer(asked, pays, capsys):
    local = next(row for row in pays.rows if row.every > 1)
    asked["answer"] = pays._replace(rows=(local, *pays.rows))
    assert main([*ASKED, "--parameters=25M"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"It goes {local.place}. --program prints how." in said
    assert local.place == "around your optimizer; parameters have a row for each worker"
    whole = local._replace(whole=True)
    assert whole.place.startswith("in place of your optimizer, at a learning rate of its own; par")
    assert str(local).startswith(f"{local.code}  # around your optimizer")


@pytest.mark.usefixtures("asked")
def test_few_rows_are_the_best_ones_and_the_best_dense_one(capsys):
    assert main([*ASKED, "--parameters=25M", "--top=1"]) == 0
    out = capsys.readouterr().out
    assert "two stages 25x" in out
    assert "dense bfloat16" in out
    assert "dense float32" not in out
    assert "PowerSGD" not in out


def test_json_says_where_a_row_pays_over_any_link(asked, pays, capsys):
    rows = [
        row._replace(break_even=at)
        for row, at in zip(pays.rows, (math.inf, 0.0, None), strict=False)
    ]
    asked["answer"] = pays._replace(rows=tuple(rows))
    assert main([*ASKED, "--parameters=25M", "--json=-"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert [row["pays_below"] for row in told] == ["any link", "never", ""]
    assert [row["break_even"] for row in told] == [None, 0.0, None]


@pytest.mark.usefixtures("asked")
def test_json_is_all_rows_and_nothing_else(pays, capsys):
    assert main([*ASKED, "--parameters=25M", "--top=1", "--json=-"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (report["best"], report["compress"]) == (pays.best.name, True)
    assert report["link"]["bandwidth"] == 12_500_000.0
    assert report["workers"] == 16
    assert report["timings"]["dense float32"] == {
        "compress": 0.0, "decompress": 0.0, "workers": [], "compile": 0.0
    }  # fmt: skip
    assert [one["name"] for one in report["rows"]] == [row.name for row in pays.rows]
    for one, row in zip(report["rows"], pays.rows, strict=True):
        assert one["seconds"] == row.seconds
        assert one["parts"]["exchange"] == row.parts.exchange
        assert one["break_even"] == (None if row.break_even == math.inf else row.break_even)


@pytest.mark.usefixtures("asked")
def test_the_figure_is_drawn(tmp_path):
    assert main([*ASKED, "--parameters=25M", f"--png={tmp_path / 'plan.png'}"]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_from_the_file_to_the_answer(monkeypatch, tmp_path, capsys):
    """With nothing in place of the library but fewer candidates."""
    monkeypatch.setattr(planning._measure, "candidates", lambda *_: ROWS)
    np.savez(tmp_path / "gradients.npz", w=values((30, 40)), b=values((40,)))
    files = ["--gradients", str(tmp_path / "gradients.npz"), "--json=-"]
    assert (
        main(["plan", "--workers=4", "--bandwidth=1kbit", "--step=1ms", "--seconds=0.01", *files])
        == 0
    )
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["best"] == "signs"
    signs, dense = report["rows"]
    assert dense["error"] == 0.0
    assert 0.3 < signs["error"] < 1.0
    assert signs["wire_bytes"] == fg.wire_bytes(
        ROWS[1].recipe, {"w": jnp.zeros((30, 40)), "b": jnp.zeros(40)}
    )


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["plan", "--parameters=25M"], "required: --workers, --bandwidth, --step"),
        ([*ASKED, "--parameters=25M", "--params", __file__], "not allowed with"),
        (ASKED, "use --parameters 25M"),
        ([*ASKED, "--parameters=some"], "use 250000, 25M or 16Mi."),
        ([*ASKED, "--params", __file__], "np.savez(file, **arrays)"),
        ([*ASKED, "--parameters=1k", "--bandwidth=fast"], "use '1gbit' or '125MB/s'"),
        ([*ASKED, "--parameters=1k", "--bandwidth=-1gbit"], "must be positive and finite"),
        ([*ASKED, "--parameters=1k", "--latency=-1ms"], "--latency: must be finite and not neg"),
        ([*ASKED, "--parameters=1k", "--latency", "-1ms"], "--latency: must be finite and not neg"),
        ([*ASKED, "--parameters=1k", "--latency", "-.5ms"], "--latency: must be finite and not n"),
        (
            [*ASKED, "--parameters=1k", "--step=300"],
            "--step: must have a unit, got '300'; use 300ms or 0.3s.",
        ),
        ([*ASKED, "--parameters=1k", "--bandwidth=1e9"], "got '1e9'; use 1Gbit/s or 125MB/s."),
        (
            [*ASKED, "--parameters=1k", "--bandwidth=1gb"],
            "--bandwidth: must be bytes per second",
        ),
        ([*ASKED, "--parameters=1k", "--bandwidth=1gB"], "which may be bits or bytes; use '1gbit'"),
        (
            [*ASKED, "--parameters=1k", "--workers=0"],
            "--workers: must be a whole number, 2 to",
        ),
        ([*ASKED, "--parameters=1k", "--workers=1.5"], "--workers: must be a whole number, 2 to"),
        (
            [*ASKED, "--parameters=1k", "--buckets=0"],
            "--buckets: must be a whole number, 1 to",
        ),
        ([*ASKED, "--parameters=1k", "--png=plan.jpg"], "--png: must be a file that ends in .png"),
        (
            [*ASKED, "--parameters=1k", "--program=mine"],
            "--program: must be the name of a row",
        ),
        ([*ASKED, "--parameters=1k", "--program", "--json=-"], "use --json FILE"),
        (
            [*ASKED, "--parameters=1k", "--fast=32", "--fast-bandwidth=1GB/s", "--program"],
            "--fast: must be a divisor of the 16 workers",
        ),
        ([*ASKED, "--parameters=1k", "--fast=8"], "use --fast 8 --fast-bandwidth 50GB/s"),
        ([*ASKED, "--parameters=1k", "--fast-bandwidth=1GB/s"], "use --fast 8"),
        ([*ASKED, "--parameters=1k", "--algorithm=star"], "invalid choice"),
        ([*ASKED, "--gradients", __file__], "got other content"),
    ],
)
def test_bad_usage_is_a_line_and_exit_code_2(capsys, argv, remedy):
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert remedy in line


def test_files_of_other_dtypes_are_gradients(asked, tmp_path):
    tree = {"w": values((3, 4)).astype(np.float64), "b": values((4,)).astype(jnp.bfloat16)}
    np.savez(tmp_path / "gradients.npz", step=np.arange(3), **tree)
    assert main([*ASKED, "--gradients", str(tmp_path / "gradients.npz")]) == 0
    (gradient,) = asked["gradients"]
    for found in (asked["params"], gradient):
        assert {name: leaf.dtype for name, leaf in found.items()} == {
            "w": np.float32 if found is asked["params"] else np.float64, "b": jnp.bfloat16
        }  # fmt: skip
    np.testing.assert_array_equal(gradient["w"], values((3, 4)))
    np.savez(tmp_path / "counts.npz", step=np.arange(3))
    assert main([*ASKED, "--gradients", str(tmp_path / "counts.npz")]) == 2
