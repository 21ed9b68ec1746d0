"""The main job, small, and the same job in each framework."""

import importlib
import json
import pathlib
import re
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
SCRIPT = str(EXAMPLES / "train_lm.py")
FRAMEWORKS = sorted((EXAMPLES / "frameworks").glob("[a-z]*.py"))


@pytest.fixture(scope="module")
def job():
    return runpy.run_path(SCRIPT)


def records(folder):
    (file,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_it_writes_table_picture_and_metrics(job, tmp_path, capsys):
    job["main"](["--smoke", "--runs", "dense,blocked", "--out", str(tmp_path)])
    assert "FFT 64" in capsys.readouterr().out
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


def test_an_unknown_run_is_answered(job, tmp_path):
    with pytest.raises(SystemExit, match="choose from dense,paper"):
        job["main"](["--smoke", "--runs", "dense,zip", "--out", str(tmp_path)])


def test_in_each_framework_training_ends_with_the_same_bits(capsys, monkeypatch):
    """From the same parameters, on the same batches, with error feedback."""
    monkeypatch.syspath_prepend(EXAMPLES / "frameworks")
    monkeypatch.setattr(importlib.import_module("_job"), "STEPS", 12)
    printed = {}
    for file in FRAMEWORKS:
        runpy.run_path(str(file), run_name="__main__")
        printed[file.stem] = capsys.readouterr().out
    assert len(printed) == 5
    assert len(set(printed.values())) == 1, printed
    first, last = map(float, re.findall(r"\d\.\d+", printed["plain_pytrees"]))
    assert last < first - 0.5


@pytest.mark.parametrize("file", FRAMEWORKS, ids=lambda file: file.stem)
def test_an_example_is_as_short_as_the_docs_say(file):
    lines = len(file.read_text().splitlines())
    page = (EXAMPLES.parent / "docs/frameworks.md").read_text()
    (said,) = re.findall(rf"{file.name}` .*\| (\d+) \|", page)
    assert lines == int(said) < 100
