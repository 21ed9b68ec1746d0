"""The frame: help that teaches, one line for what is wrong, and exit codes that say which."""

import argparse
import inspect
import json
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
import types

import hypothesis
import hypothesis.strategies as st
import pytest

from fftgrad.__main__ import EXTRA, main
from fftgrad.planning import _link
from fftgrad.planning.commands import _bench, _frame
from fftgrad.planning.commands._text import FACTORS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def said(capsys, *argv):
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    return code, *capsys.readouterr()


def raising(monkeypatch, error):
    """`fftgrad bench`, which only raises."""

    def run(*_):
        raise error

    kept = {name: getattr(_bench, name) for name in ("HELP", "EPILOG", "add_arguments")}
    command = types.SimpleNamespace(**kept, run=run)
    monkeypatch.setattr(_frame, "COMMANDS", {"bench": command})


@pytest.mark.parametrize("command", [(), *((name,) for name in _frame.COMMANDS)])
def test_help_teaches_in_eighty_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = said(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) < 80
    assert "\n  fftgrad " in out
    assert "exit codes:" in out


@pytest.mark.parametrize("name", _frame.COMMANDS)
def test_the_examples_of_the_help_are_right(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    command = _frame.COMMANDS[name]
    lines = [line.strip() for line in command.EPILOG.replace("\\\n", " ").splitlines()]
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("fftgrad ")]
    assert examples
    for example in examples:
        for word in example:
            if word.endswith(".npz"):
                pathlib.Path(word).touch()
        assert _frame.make_parser().parse_args(example).command == name


@pytest.mark.parametrize("name", _frame.COMMANDS)
def test_a_command_is_what_its_contract_says(name):
    command = _frame.COMMANDS[name]
    assert "\n" not in command.HELP
    assert not command.HELP.endswith(".")
    assert command.EPILOG.endswith("\n")


def test_the_version_is_that_of_the_library(capsys):
    code, out, _ = said(capsys, "--version")
    assert code == 0
    assert out.split()[0] == "fftgrad"
    assert _frame.version("not a package") == "not installed"


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ((), "required: COMMAND"),
        (("fly",), "choose from"),
        (("bench", "--sizes", "many"), "got 'many'; use 250000, 25M or 16Mi."),
        (("bench", "--sizes", "1.5"), "got '1.5'"),
        (("bench", "--sizes", "1Mi,,2Mi"), "got ''"),
        (("bench", "--seconds", "0"), "above 0 and at most 86400, got '0'"),
        (("bench", "--seconds", "nan"), "above 0 and at most 86400, got 'nan'"),
        (("analyze", "nowhere.npz"), "must be a file that exists"),
        (("bench", "--json", "nowhere/report.json"), "in a folder that exists"),
        (("analyze", __file__, "--png", "."), "in a folder that exists"),
        (("analyze", __file__, "--png", "report.svg"), "must be a file that ends in .png"),
        (("analyze", "s3://bucket/own.npz"), "must be a file that exists"),
        (("analyze", __file__), "got other content"),
        (("bench", "one\ntwo"), "unrecognized arguments: one two"),
        (("bench", "--json=~nobody-of-this-name/x"), "in a folder that exists"),
    ],
)
def test_bad_usage_is_a_line_and_exit_code_2(capsys, argv, remedy):
    code, out, err = said(capsys, *argv)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert remedy in line


def arguments():
    """Each argument of each command that is given a text."""
    (commands,) = (a for a in _frame.make_parser()._actions if a.dest == "command")
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if action.type is not None:
                yield pytest.param(parser, action, id=f"{name}-{action.dest}")


NUMBERS = st.one_of(
    st.floats().map(repr), st.integers().map(str), st.integers(0, 99_999_999).map("1e{}".format),
    st.integers(0, 99_999_999).map("1e-{}".format), st.integers(1, 9_999).map("9".__mul__),
    st.just("1" * 20_000 + " x y"),
)  # fmt: skip
UNITS = st.sampled_from(["", *_link.SECONDS, *FACTORS, "bit", "mbps", "GB/s", "gb", " Mbit/s"])
TEXTS = st.one_of(
    st.text(), st.tuples(NUMBERS, UNITS).map("".join), st.text("~/.\0\ud800x,", max_size=9),
    st.lists(NUMBERS, max_size=3).map(",".join), st.integers(1, 9_999).map("x".__mul__),
)  # fmt: skip


@pytest.mark.parametrize(("parser", "action"), [*arguments()])
@hypothesis.settings(max_examples=50, deadline=2000, database=None, derandomize=True)
@hypothesis.given(text=TEXTS)
@hypothesis.example(text="9" * 5000)
@hypothesis.example(text="~x/y")
def test_any_text_is_a_value_or_an_error_of_one_line(parser, action, text):
    """Which names the argument, the rule, the text and a remedy."""
    try:
        value = parser._get_value(action, text)
    except argparse.ArgumentError as error:
        (line,) = str(error).splitlines()
        said = r"argument [-\w/]+: must (be|have) .+, got .+; \w.*"
        assert re.fullmatch(said, line), line
        assert len(line) < 1000
        return
    for number in value if isinstance(value, tuple) else (value,):
        assert not isinstance(number, int | float) or 0 <= number <= 1e15


def test_a_tilde_is_the_home_also_where_no_shell_expands_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "there.npz").touch()
    parse = _frame.make_parser().parse_args
    found = parse(["analyze", "~/there.npz", "--json=~/x.json", "--png=~/x.png"])
    assert found.gradients == [tmp_path / "there.npz"]
    assert (found.json, found.png) == (tmp_path / "x.json", tmp_path / "x.png")
    assert parse(["islands", "status", "~/run"]).url == str(tmp_path / "run")
    assert parse(["islands", "status", "s3://bucket/~/run"]).url == "s3://bucket/~/run"


def test_an_error_of_the_library_is_its_own_line(capsys, monkeypatch):
    raising(monkeypatch, ValueError("TopK(k): must be 1 or more,\n  got 0; use k=1."))
    code, out, err = said(capsys, "bench")
    assert (code, out) == (2, "")
    assert err == "fftgrad bench: TopK(k): must be 1 or more, got 0; use k=1.\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("bench(seconds): must be short; use 3.", "--seconds: must be short; use 3."),
        ("load_gradients(a (b).npz): is bad.", "load_gradients(a (b).npz): is bad."),
    ],
)
def test_errors_speak_of_flags(capsys, monkeypatch, error, line):
    raising(monkeypatch, ValueError(error))
    assert said(capsys, "bench") == (2, "", f"fftgrad bench: {line}\n")


@pytest.mark.parametrize(
    "error", [RuntimeError("Out of memory"), ValueError("of nobody's"), KeyError("k")]
)
def test_any_other_error_is_a_run_that_failed(capsys, monkeypatch, error):
    raising(monkeypatch, error)
    code, _, err = said(capsys, "bench")
    assert code == 1
    (line,) = err.splitlines()
    assert type(error).__name__ in line
    assert "--traceback" in line


def test_the_traceback_is_for_who_asks(capsys, monkeypatch):
    raising(monkeypatch, RuntimeError("Out of memory"))
    code, _, err = said(capsys, "bench", "--traceback")
    assert code == 1
    assert "in run" in err
    assert err.endswith("fftgrad: RuntimeError: Out of memory\n")


def test_an_interrupted_run_is_130(capsys, monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    assert said(capsys, "bench") == (130, "", "fftgrad: interrupted\n")


def process(code, *argv, **others):
    """A Python program in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, env=environment, text=True, **others
    )


@pytest.mark.parametrize(
    ("missing", "argv"),
    [("rich", ["--help"]), ("matplotlib", ["analyze", __file__, "--png", "report.png"])],
)
def test_without_the_extra_it_says_how_to_get_it(missing, argv):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        "from fftgrad.__main__ import main; sys.exit(main())"
    )
    done = process(code, *argv, capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fftgrad: {missing} is not installed; run pip install -e ")
    assert '".[cli]"' in done.stderr


def test_without_matplotlib_only_the_figure_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = said(capsys, "bench", "--smoke")
    assert code == 0
    assert "top-k 1 %" in out


def test_another_missing_module_is_a_bug_and_not_an_extra(monkeypatch):
    raising(monkeypatch, ModuleNotFoundError("No module named 'jaxlib'", name="jaxlib"))
    with pytest.raises(ModuleNotFoundError, match="jaxlib"):
        main(["bench"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argv", [["--version"], ["bench", "--smoke"]])
def test_a_reader_who_has_enough_is_left_in_peace(monkeypatch, argv, unbuffered):
    """Also if Python writes at once what is printed."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from fftgrad.__main__ import main; sys.exit(main())"
    done = process(code, *argv, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == ""
    # What argparse fails to print at once it says nothing of, but in its older versions.
    silent = "OSError" in inspect.getsource(argparse.ArgumentParser._print_message)
    assert done.returncode == (0 if silent and unbuffered and argv == ["--version"] else 141)


def test_as_a_module_it_prints_json_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-m", "fftgrad", "bench", "--smoke", "--json", "-"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["sizes"][0]["codecs"]] == list(_bench.SMOKE)
    assert report["devices"] == 1
    assert report["all_reduce"] == []
    assert set(_bench.SMOKE) <= set(_bench.CODECS)


def test_the_console_script_and_its_extra_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["fftgrad"]) is main
    extra = project["optional-dependencies"]["cli"]
    assert tuple(need.partition(">")[0] for need in extra) == EXTRA
