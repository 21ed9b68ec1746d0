"""The main job, small: what it prints and what it writes, also when it is interrupted."""

import json
import pathlib
import runpy

import pytest

SCRIPT = str(pathlib.Path(__file__).parent.parent.parent / "examples/train_lm.py")


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
