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
from fftgrad.planning._text import quantity, three_digits
from fftgrad.planning._timing import Timed

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs/command-line.md"
PLAN = ["plan", "--workers=16", "--bandwidth=100mbit", "--step=30ms"]
LLAMA = ["--model=llama:134M"]
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
        (["bench", "--sizes", "many"], "invalid int value: 'many'"),
        (["analyze", "nowhere.npz"], "nowhere.npz"),
        (["analyze", __file__], "got other content"),
        (["plan", *LLAMA], "required: --workers, --bandwidth, --step"),
        (PLAN, "one of the arguments --model --layers --params is required"),
        ([*PLAN, "--model=bert"], "invalid choice: 'bert' (choose from"),
        ([*PLAN, *LLAMA, "--device=b200"], "run `fftgrad bench` on the device"),
        ([*PLAN, "--params", __file__], "np.savez(file, **arrays)"),
        ([*PLAN, *LLAMA, "--bandwidth=fast"], "use '1gbit' or '125MB/s'"),
        ([*PLAN, *LLAMA, "--latency=-1ms"], "Link(latency): must be seconds"),
        ([*PLAN, *LLAMA, "--workers=0"], "plan(workers): must be at least 2, got 0"),
        ([*PLAN, *LLAMA, "--fast=3"], "plan(fast): must be a divisor of the 16"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_exit_code_2(capsys, argv, remedy):
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert remedy in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("fftgrad")


def test_any_other_error_is_a_run_that_failed(monkeypatch):
    monkeypatch.setattr(planning, "load_gradients", lambda *_: int("of nobody's"))
    with pytest.raises(ValueError, match="of nobody's"):
        main(["analyze", "x.npz"])


def test_it_runs_as_a_module_and_as_the_console_script_of_pyproject():
    done = subprocess.run(
        [sys.executable, "-m", "fftgrad", "--version"],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fftgrad ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["fftgrad"]) is main


# Numbers and tables


def test_quantities_have_three_digits():
    told = [quantity(x, "s") for x in (0.3123, 0.0, 1e-7, 999.6, 12345.0, np.inf)]
    assert told == ["312 ms", "0 s", "100 ns", "1,000 s", "12,300 s", "inf s"]
    assert quantity(12345.0, "B") == "12.3 kB"
    assert [three_digits(x) for x in (1976.3, 0.51234, 2.0)] == ["1,980", "0.512", "2"]


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
    assert main([*PLAN, *LLAMA, "--latency=2ms"]) == 0
    assert asked["link"] == planning.Link("100mbit", "2ms")
    assert (asked["workers"], asked["step"]) == (16, "30ms")
    assert (asked["fast"], asked["measure"]) == (None, False)
    assert main([*PLAN, "--layers=1", "--width=8", "--vocab=9"]) == 0
    assert asked["params"]["embed"].shape == (9, 8)
    assert main([*PLAN, *LLAMA, "--device=h100"]) == 0
    assert asked["params"]["embed"].shape == (32_000, 768)
    assert asked["device"] == "h100"
    assert main([*PLAN, *LLAMA, "--fast=8"]) == 0
    assert asked["link"] == planning.Link("100mbit", "100us")
    assert asked["fast"] == (8, planning.Link("50GB/s", "10us"))
    np.savez(tmp_path / "params.npz", w=values((3, 4)), b=values((4,)), step=np.arange(3))
    assert main([*PLAN, "--params", str(tmp_path / "params.npz")]) == 0
    assert jax.tree.map(jnp.shape, asked["params"]) == {"w": (3, 4), "b": (4,)}


def test_the_answer_is_a_table_a_sentence_and_code_also_where_dense_is_best(asked, capsys):
    assert main([*PLAN, *LLAMA]) == 0
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
    assert main([*PLAN[:2], "--bandwidth=100tbit", "--step=30ms", *LLAMA]) == 0  # no failure
    out, best = " ".join(capsys.readouterr().out.split()), asked["found"].best
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
    like, given = jax.ShapeDtypeStruct((2**12,), jnp.float32), iter(range(1, 9))
    monkeypatch.setattr(_commands, "timed", lambda *_: Timed(next(given), 0, 3))
    codecs = {"sign": fg.Sign(), "ternary": fg.codecs.Ternary()}
    sign, ternary = (fg.wire_bytes(codec, like) for codec in codecs.values())
    found = _commands.time_codecs(like.size, codecs, 0.01)
    assert found == [("sign", 1, 2, sign), ("ternary", 3, 4, ternary)]
    lines = _commands.show(
        like.size, [(name, 1.0, 2.0, 9) for name in _commands.CODECS]
    ).splitlines()
    for name in _commands.CODECS:
        (line,) = (line for line in lines if line.startswith(name + " "))
        assert line.endswith("bit/s"), line
    assert max(map(len, lines)) <= 90
    # Over the link of a row, the bytes that it saves take as long as the codec.
    row = ("half", 0.5, 0.5, 2_000)
    assert "500 ms 2 kB 2 16 kbit/s" in " ".join(_commands.show(1000, [row]).split())
    assert "0 bit/s" in _commands.show(1000, [(*row[:3], 5000)])


def test_the_device_and_sizes_are_told(monkeypatch, capsys):
    monkeypatch.setattr(_commands, "CODECS", {"sign": fg.Sign()})
    assert main(["bench", "--sizes", "1024", "4096", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    for text in (_devices.measured().name, "1,024 values", "4,096 values"):
        assert text in out
    assert _devices.find(_devices.kept()) == _devices.measured()
    assert str(_devices.kept()) in out
