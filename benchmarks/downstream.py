"""Whether a model that was trained at fewer bytes is worse to begin from, at the same loss.

Dense runs of several lengths tell how the loss after fine-tuning follows from the loss before. The
other rows are compared with that line. Fine-tuning is dense, on 100 kB of NumPy's source.
"""

import pathlib
from typing import Any

import numpy as np
from _record import markdown
from ends import filled, muon
from held_out import HELD_OUT, trained
from methods import Method, local_filled, renamed
from program import Column, Point, Study
from tasks import Batch

DENSE = "dense, Adam"


class FineTuned(Column):
    """The held-out loss after a dense fine-tuning."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Of what all workers have in common."""
        del batch
        smoke = self.program.setting.steps < 100
        task, params = HELD_OUT["fine-tuning"](smoke), self.program.common(end)
        after = trained(task, params, task.rate, 2 if smoke else 300, 16)
        return {"before": task.assess(params)["loss"], "after": task.assess(after)["loss"]}


METHODS: list[Method] = [
    renamed(DENSE, "dense"),
    renamed("dense, Muon", "dense", muon=True),
    filled("100x, Muon, lead 0.5", 100, optimizer=muon(0.5)),
    local_filled("4 local steps of Adam, 25x", 4, 25),
]


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table."""
    del folder, name
    print(tables(results))


def tables(results: dict[str, Any]) -> str:
    """Losses of the task, and of the other text before and after fine-tuning."""
    runs = sorted(results["runs"], key=lambda run: run["loss"])
    line = [(run["loss"], run["after"]) for run in runs if run["method"] == DENSE]
    rows: list[list[str]] = []
    for run in runs:
        losses = [f"{run[key]:.3f}" for key in ("loss", "before", "after")]
        between = line and line[0][0] <= run["loss"] <= line[-1][0]
        expected = f"{np.interp(run['loss'], *np.transpose(line)):.3f}" if between else ""
        rows.append([run["method"], str(run["steps"]), *losses, expected])
    titles = ["method", "steps", "loss", "of the other text", "after fine-tuning"]
    return markdown([*titles, "dense after as low a loss"], rows)


STUDY = Study(
    folder="convergence",
    file="downstream",
    rows=METHODS,
    show=show,
    tasks=("pretraining",),
    steps=1000,
    seeds=1,
    devices=False,
    column=FineTuned,
    smoke=(DENSE, "4 local steps of Adam, 25x"),
)
