"""The main job, small, and the same job in each framework."""

import io
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
from processes import ROOT
from rich.console import Console

EXAMPLES = ROOT / "examples"
SCRIPT = str(EXAMPLES / "train_lm.py")
FRAMEWORKS = sorted((EXAMPLES / "frameworks").glob("[a-z]*.py"))


@pytest.fixture(scope="module")
def job():
    return runpy.run_path(SCRIPT)


def records(folder):
    (file,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.smoke
@pytest.mark.processes
def test_it_writes_table_picture_and_metrics(job, tmp_path, capsys):
    job["main"](["--smoke", "--runs", "dense,blocked", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\ndense Adam: compiling\n" in out
    assert "FFT 64 + EF ends " in out
    assert "predict_step expects of a step: dense Adam 0." in " ".join(out.split())
    assert next(tmp_path.glob("*/curves.png")).stat().st_size > 10_000
    steps = [r for r in records(tmp_path) if "step" in r]
    assert len(steps) == 6
    dense, blocked = (r["summary"] for r in records(tmp_path) if "summary" in r)
    assert dense["sent"] / blocked["sent"] > 12
    assert dense["error"] < 1e-6 < blocked["error"] < 1


def test_an_interrupt_leaves_table_and_files(job, tmp_path, capsys, monkeypatch):
    sample, calls = job["sample"], []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(*args)

    monkeypatch.setitem(job["train"].__globals__, "sample", interrupted)
    job["main"](["--smoke", "--runs", "dense,topk", "--out", str(tmp_path)])
    assert "interrupted" in capsys.readouterr().out
    assert next(tmp_path.glob("*/curves.png")).stat().st_size > 10_000
    (summary,) = (r["summary"] for r in records(tmp_path) if "summary" in r)
    assert len(summary["losses"]) == 2


def test_a_pipe_sees_a_line_in_ten_seconds(job, monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(job["time"], "monotonic", lambda: now[0])
    report = job["Report"](console=Console(file=out), disable=True)
    for second in range(25):
        now[0] = float(second)
        report.line(f"step {second}")
    assert out.getvalue().split("\n") == ["step 0", "step 10", "step 20", ""]


SHORT = """
import runpy, sys
import _job
_job.STEPS = 12
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
"""


@pytest.mark.processes
def test_in_each_framework_training_ends_with_the_same_bits():
    """From the same parameters, on the same batches, with error feedback.

    In a process without the flags of the tests: where little is optimized, what a program rounds
    depends on how the framework wrote it.
    """
    path = [str(EXAMPLES.parent), str(EXAMPLES / "frameworks")]
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "32"}
    run = subprocess.run(
        [sys.executable, "-c", SHORT, *map(str, FRAMEWORKS)],
        env=os.environ | devices | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(FRAMEWORKS) == 5
    assert len(set(lines)) == 1, lines
    first, last = map(float, re.findall(r"\d\.\d+", lines[0]))
    assert last < first - 0.5
