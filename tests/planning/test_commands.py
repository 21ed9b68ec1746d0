"""The command line: help that teaches, one line for what is wrong, and answers of the library."""

import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg
from fftgrad import planning
from fftgrad.__main__ import main
from fftgrad.planning import _candidates, _commands, _devices, _plan
from fftgrad.planning._text import parse_count, quantity, table, three_digits

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs/command-line.md"
PLAN = ["plan", "--workers=16", "--bandwidth=100mbit", "--step=30ms"]
TINY = ["--layers=1", "--width=8", "--vocab=8"]
SMALL = ["--layers=1", "--width=256", "--vocab=500"]
NAMES = {"dense float32", "dense bfloat16", "two stages 25x, Muon", "signs, two stages"}


def said(capsys, *argv):
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    return code, *capsys.readouterr()


# The frame


@pytest.mark.parametrize("command", [(), *((name,) for name in _commands.COMMANDS)])
def test_help_teaches_in_eighty_columns(capsys, command):
    code, out, err = said(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) < 80
    assert re.search("^  .*fftgrad ", out, re.MULTILINE)
    assert "exit codes:" in out


@pytest.mark.parametrize("name", _commands.COMMANDS)
def test_the_examples_of_the_help_are_right(name):
    text = _commands.COMMANDS[name][1].replace("\\\n", " ")
    examples = re.findall(r"^ .*?fftgrad (.*)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        assert _commands.make_parser().parse_args(shlex.split(example)).command == name


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ([], "required: COMMAND"),
        (["bench", "--sizes", "many"], "got 'many'; use 250000, 25M or 16Mi."),
        (["bench", "--sizes", "1Mi,,2Mi"], "got ''"),
        (["analyze", "nowhere.npz"], "nowhere.npz"),
        (["analyze", __file__], "got other content"),
        (["plan", "--model=gpt2:124M"], "required: --workers, --bandwidth, --step"),
        (PLAN, "one of the arguments --model --layers --params is required"),
        ([*PLAN, "--model=bert"], "must be one of gpt2:124M, llama:134M"),
        ([*PLAN, "--layers=2"], "got 2 and None; use both"),
        ([*PLAN, "--model=gpt2:124M", "--width=64"], "got None and 64; use both"),
        ([*PLAN, *TINY, "--device=b200"], "run `fftgrad bench` on the device"),
        ([*PLAN, "--params", __file__], "np.savez(file, **arrays)"),
        ([*PLAN, *TINY, "--bandwidth=fast"], "use '1gbit' or '125MB/s'"),
        ([*PLAN, *TINY, "--latency=-1ms"], "Link(latency): must be seconds"),
        ([*PLAN, *TINY, "--workers=0"], "plan(workers): must be at least 2, got 0"),
        ([*PLAN, *TINY, "--fast=3"], "plan(fast): must be a divisor of the 16"),
        ([*PLAN, *TINY, "--algorithm=star"], "invalid choice"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_exit_code_2(capsys, argv, remedy):
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert remedy in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("fftgrad")


def test_any_other_error_is_a_run_that_failed(monkeypatch):
    def fail(*_):
        raise ValueError("of nobody's")

    monkeypatch.setattr(planning, "load_gradients", fail)
    with pytest.raises(ValueError, match="of nobody's"):
        main(["analyze", "x.npz"])


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "fftgrad", "--version"],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fftgrad ")


def test_the_console_script_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["fftgrad"]) is main


# Numbers and tables


def test_counts():
    counts = {"250000": 250_000, "25M": 25_000_000, "1.5G": 1_500_000_000, "7B": 7_000_000_000}
    counts |= {"64Ki": 65_536, "0.5Ki": 512}
    assert {text: parse_count("bench(--sizes)", text) for text in counts} == counts
    for text in ("", "0", "-3", "1.5", "M", "3m", "1e6", "2 M", "0.1Ki", "nan"):
        with pytest.raises(ValueError, match="must be a number of values"):
            parse_count("bench(--sizes)", text)


def test_quantities_have_three_digits():
    told = [quantity(x, "s") for x in (0.3123, 0.0, 1e-7, 999.6, 12345.0, np.inf)]
    assert told == ["312 ms", "0 s", "100 ns", "1,000 s", "12,300 s", "inf s"]
    assert quantity(12345.0, "B") == "12.3 kB"
    assert [three_digits(x) for x in (1976.3, 0.51234, 2.0)] == ["1,980", "0.512", "2"]


def test_a_table_has_names_on_the_left_and_numbers_on_the_right():
    found = table(("row", "s", "loss"), [("a", "1.5", "as dense"), ("longer", "10", "x")], (0, 2))
    assert found.splitlines() == [
        "row      s loss",
        "-" * 19,
        "a      1.5 as dense",
        "longer  10 x",
    ]


# plan


@pytest.fixture
def asked(monkeypatch):
    """What the library was asked, which then has few candidates, whose codecs take 3 ms."""
    calls, usual, own = {}, _candidates.candidates, planning.plan
    fewer = lambda *given: [row for row in usual(*given) if row.name in NAMES]  # noqa: E731
    monkeypatch.setattr(_plan, "candidates", fewer)
    times = {True: planning.Timing(0.0, 0.0), False: planning.Timing(0.001, 0.002)}

    def plan(params, **others):
        calls.clear()
        calls.update(others, params=params)
        timings = {name: times[name.startswith("dense")] for name in NAMES}
        calls["found"] = own(params, **others, timings=timings)
        return calls["found"]

    monkeypatch.setattr(planning, "plan", plan)
    return calls


def test_what_is_asked_reaches_the_library(asked, tmp_path):
    assert main([*PLAN, *SMALL, "--latency=2ms"]) == 0
    assert asked["link"] == planning.Link("100mbit", "2ms")
    assert (asked["workers"], asked["step"]) == (16, "30ms")
    assert (asked["fast"], asked["algorithm"], asked["measure"]) == (None, "fastest", False)
    assert main([*PLAN, "--layers=1", "--width=8", "--vocab=9", "--device=h100"]) == 0
    assert asked["params"]["embed"].shape == (9, 8)
    assert asked["device"] == "h100"
    assert main([*PLAN, *TINY, "--fast=8", "--algorithm=ring"]) == 0
    assert asked["link"] == planning.Link("100mbit", "100us")
    assert asked["fast"] == (8, planning.Link("50GB/s", "10us"))
    assert asked["algorithm"] == "ring"
    np.savez(tmp_path / "params.npz", w=values((3, 4)), b=values((4,)), step=np.arange(3))
    assert main([*PLAN, "--params", str(tmp_path / "params.npz")]) == 0
    assert jax.tree.map(jnp.shape, asked["params"]) == {"w": (3, 4), "b": (4,)}


def test_the_answer_is_a_table_a_sentence_and_code(asked, capsys):
    assert main([*PLAN, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = asked["found"].best
    assert lines[-1] == best.code  # as long as it is, on a line of its own
    assert max(map(len, lines[:-1])) <= 90
    flat = " ".join(" ".join(lines).split())
    assert f"{best.name} reaches dense's loss" in flat
    assert f"sooner than {asked['found'].dense.name}" in flat
    assert f"Loss: {best.loss}. It goes {best.place}." in flat
    for text in (*NAMES, "3 ms", "loss: check", "Codec times: as given."):
        assert text in flat, text


def test_where_dense_is_best_it_says_so_and_that_is_no_failure(asked, capsys):
    assert main([*PLAN[:2], "--bandwidth=100gbit", "--step=30ms", *SMALL]) == 0
    out = " ".join(capsys.readouterr().out.split())
    best = asked["found"].best
    assert f"Do not compress: {best.name} takes" in out
    assert "is predicted to take" in out
    assert out.endswith(best.code)


def test_the_page_shows_what_its_command_prints(capsys):
    """For a named device, so that every machine prints the same."""
    command, block = re.search(
        r"```sh\nfftgrad (plan .*?)\n```\n\n.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL
    ).groups()
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    assert capsys.readouterr().out == block


# bench


def test_each_codec_has_its_times_and_the_table_of_all_fits(monkeypatch):
    like = jax.ShapeDtypeStruct((2**12,), jnp.float32)

    def in_turn(tasks, _):
        return [_commands.Timed(1.0 + n, 1.0 + n, 3) for n in range(len(tasks))]

    monkeypatch.setattr(_commands, "_both_ways", lambda *_: [(None, [])] * 2)
    monkeypatch.setattr(_commands, "timed_in_turn", in_turn)
    copy, rows = _commands.time_codecs(like.size, _commands.CODECS, 0.01)
    assert copy.seconds == 1
    assert [row.name for row in rows] == list(_commands.CODECS)
    for number, row in enumerate(rows):
        assert row.wire_bytes == fg.wire_bytes(_commands.CODECS[row.name], like)
        assert (row.compress.seconds, row.decompress.seconds) == (2 * number + 2, 2 * number + 3)
    lines = _commands.show(like.size, copy, rows).splitlines()
    for name in _commands.CODECS:
        (line,) = (line for line in lines if line.startswith(name + " "))
        assert line.endswith("bit/s"), line
    assert max(map(len, lines)) <= 90


def test_over_the_link_of_a_row_the_bytes_that_it_saves_take_as_long_as_it():
    time = _commands.Timed(0.5, 0.4, 3)
    row = _commands.CodecTimes("half", time, time, 2_000)
    assert "25% 8e-06 2 2 kB 2 16 kbit/s" in " ".join(_commands.show(1000, time, [row]).split())
    never = _commands.show(1000, time, [row._replace(wire_bytes=5000)])
    assert "0 bit/s" in never


def test_the_machine_and_sizes_are_told(monkeypatch, capsys):
    monkeypatch.setattr(_commands, "CODECS", {"sign": fg.Sign()})
    assert main(["bench", "--sizes", "1Ki,4Ki", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    for text in (jax.__version__, f"{jax.device_count()} x", "1,024 values", "4,096 values"):
        assert text in out
    assert _devices.find(_devices.kept()) == _devices.measured()
    assert str(_devices.kept()) in out
