"""The figure of `examples/train_lm.py` for the docs: loss against steps, and against bytes sent.

python examples/train_lm.py --runs dense,paper,blocked,topk --steps 180 --out runs
python benchmarks/main_job.py runs/*/metrics.jsonl
"""

import argparse
import json
import pathlib
from typing import Any

import _style as style
import numpy as np
from _record import RESULTS, save
from _style import styles
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

WINDOW = 9
"""Steps of which a point is the mean."""
SHOWN = {
    "dense Adam": "dense",
    "FFT whole": "FFT whole",
    "FFT 64 + EF": "FFT 64",
    "top-k + EF": "top-k",
}


def draw(rows: list[dict[str, Any]]) -> Figure:
    """A curve a run."""
    figure = style.figure(5.6)
    by_step, by_bytes = figure.subplots(2, 1, sharey=True)
    looks = styles(SHOWN.values())
    lines = dict[str, Line2D]()
    for run, name in SHOWN.items():
        own = [row for row in rows if row.get("run") == run]
        losses = np.convolve([row["loss"] for row in own], np.ones(WINDOW) / WINDOW, "valid")
        for axes, key, unit in ((by_step, "step", 1), (by_bytes, "bytes", 1e6)):
            at = [row[key] / unit for row in own[WINDOW - 1 :]]
            (lines[name],) = axes.plot(at, losses, **looks[name])
    by_step.set(xlabel="steps", title="Training loss, nats a byte (mean of 9 steps)")
    by_bytes.set(xlabel="MB that each worker has handed to the network", xscale="log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    figure.legend(lines.values(), lines, ncols=4, loc="outside upper center")
    return figure


def main() -> None:
    """Reads the losses of a run, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=pathlib.Path, help="metrics.jsonl of the job")
    lines = parser.parse_args().metrics.read_text().splitlines()
    save(draw(list(map(json.loads, lines))), RESULTS / "train_lm", "train_lm")


if __name__ == "__main__":
    main()
