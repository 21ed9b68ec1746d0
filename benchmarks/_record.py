"""What the benchmarks share around their results: command line, result file and tables."""

import argparse
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
SAVED = ROOT / "benchmarks/data/gradient.npy"
"""A gradient of `examples/train_lm.py`, half-way through a dense run."""


def folder_at(text: str) -> pathlib.Path:
    """A folder on the command line. The shell leaves the `~` of `--out=~/results` to us."""
    return pathlib.Path(text).expanduser()


def parser(doc: str | None, folder: str, /, **options: tuple[Any, str]) -> argparse.ArgumentParser:
    """A command line with `--out` and `--smoke`, and an option for each keyword.

    Args:
      doc: what the program does.
      folder: where its committed results lie, in `RESULTS`.
      **options: default value and help. The default has the type; a list takes several values.
    """
    out = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    place = RESULTS / folder
    out.add_argument("--out", type=folder_at, default=place, help="folder for the results")
    out.add_argument("--smoke", action="store_true", help="a short run of something tiny")
    for name, (default, told) in options.items():
        kind: dict[str, Any] = {"default": default, "help": told}
        if isinstance(default, bool):
            kind["action"] = "store_true"
        elif isinstance(default, list):
            kind |= {"type": type(default[0]), "nargs": "+"}
        else:
            kind["type"] = type(default)
        out.add_argument(f"--{name.replace('_', '-')}", **kind)
    return out


# Result files


def head() -> dict[str, Any]:
    """The command, the commit, the machine and the versions."""
    commit = ""
    if git := shutil.which("git"):
        command = [git, "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        commit = done.stdout.strip()
    kind = jax.devices()[0].device_kind
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "device": f"{kind} ({platform.machine()}, {os.cpu_count()} cores)",
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
    }


def write(path: pathlib.Path, content: dict[str, Any], rows: str = "") -> None:
    """Writes a result file: all on one line, or what is under the key `rows` on a line for each."""
    content = short(content)
    text = json.dumps(content, separators=(",", ":"))
    if rows:
        each = (json.dumps(row, separators=(",", ":")) for row in content.pop(rows))
        lines = ",\n".join(f"  {row}" for row in each)
        text = f'{json.dumps(content, indent=1)[:-2]},\n "{rows}": [\n{lines}\n ]\n}}'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def short(content: Any) -> Any:
    """The same with six digits of each number, or more where that is less than a byte."""
    if isinstance(content, float):
        return float(f"{content:.6g}" if abs(content) < 1e6 else f"{content:.0f}")
    if isinstance(content, Mapping):
        return {key: short(value) for key, value in content.items()}
    return [short(value) for value in content] if isinstance(content, list | tuple) else content


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Cells as a table in Markdown."""
    rule = "|---" * len(columns) + "|"
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return "\n".join([lines[0].replace("|  |", "| |"), rule, *lines[1:]])
