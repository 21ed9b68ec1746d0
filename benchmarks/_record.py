"""What every result file says of its own making, and how much it keeps of curves and digits."""

import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
DATA = pathlib.Path(__file__).parent / "data"
POINTS = 20
"""The most points that a result file keeps of a curve."""


def head() -> dict[str, Any]:
    """The command, the commit, the machine and the versions."""
    commit = ""
    if git := shutil.which("git"):
        commit = subprocess.run(
            [git, "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=pathlib.Path(__file__).parent,
        ).stdout.strip()
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


def text(content: dict[str, Any], rows: str) -> str:
    """A result file as JSON: what is under the key `rows` has a line for each."""
    content = short(content)
    others = json.dumps({key: value for key, value in content.items() if key != rows}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in content[rows])
    return f'{others[:-2]},\n "{rows}": [\n{lines}\n ]\n}}\n'


def compact(content: dict[str, Any]) -> str:
    """A result file of hundreds of rows as JSON: one line without blanks."""
    return json.dumps(short(content), separators=(",", ":")) + "\n"


def short(content: Any) -> Any:
    """The same with six digits of each number, or more where that is less than a byte."""
    if isinstance(content, float):
        return float(f"{content:.6g}" if abs(content) < 1e6 else f"{content:.0f}")
    if isinstance(content, Mapping):
        return {key: short(value) for key, value in content.items()}
    return [short(value) for value in content] if isinstance(content, list | tuple) else content


def few(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Steps and losses, after 1, 2, 5, 10, 20, 50 ... steps and after the last."""
    steps = {1, len(losses)} if losses else set[int]()
    scale = 1
    while scale <= len(losses):
        steps |= {scale, 2 * scale, 5 * scale}
        scale *= 10
    return [(step, losses[step - 1]) for step in sorted(steps) if step <= len(losses)]


def thin(curve: Sequence[Any]) -> list[Any]:
    """At most `POINTS` of the points of a curve, whose last coordinate is a metric.

    The first and the last point stay, and the first that is as good as the last.
    """
    if len(curve) <= POINTS:
        return list(curve)
    end = curve[-1][-1]
    rises = end > curve[0][-1]
    good = next(i for i, p in enumerate(curve) if (p[-1] >= end if rises else p[-1] <= end))
    evenly = {round(i * (len(curve) - 1) / (POINTS - 2)) for i in range(POINTS - 1)}
    return [curve[i] for i in sorted(evenly | {good})]
