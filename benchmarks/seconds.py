"""How a model of 5.4 million parameters learns, by step, without a link's limits.

`slow_network.py --workload large` says how long a step takes over a link; the product is the time
in which a loss is reached. No setting was chosen on this task.
"""

import pathlib
from typing import Any

from _record import markdown
from ends import DENSE, adam, filled, means, muon
from methods import POWER_SGD, Method, renamed
from program import Column, Point, Study
from tasks import Batch
from training import chosen

ASSESSED = 20
"""Times in a run."""


class Curve(Column):
    """Held-out losses by step."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.every = max(1, program.setting.steps // ASSESSED)
        self.losses: list[list[float]] = []

    def see(self, count: int, before: Point, after: Point) -> None:
        """Assesses the parameters now and then."""
        del before
        if count % self.every == 0:
            loss = self.program.task.assess(self.program.common(after))["loss"]
            self.losses.append([count, round(loss, 4)])

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """The curve."""
        del end, batch
        return {"curve": self.losses}


METHODS: list[Method] = [
    renamed("dense, Adam", "dense"),
    renamed("dense, Muon", "dense", muon=True),
    filled("100x, Muon, lead 0.5", 100, optimizer=muon(0.5)),
    filled("30x, Muon, lead 0.3", 30, optimizer=muon(0.3)),
    filled("100x, Adam, nu 0.5", 100, optimizer=adam(0.5)),
    POWER_SGD,
    renamed("4 local steps in 4 fragments, signs", "4 local steps in 4 fragments, sign"),
]


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """Of each row the loss, and when it was as low as the better dense row ends."""
    del folder, name
    found = chosen(results["runs"], "large")
    best = min(means(found, row) for row in DENSE)
    rows: list[list[str]] = []
    for method, (run, *_) in found.items():
        reached = next((step for step, loss in run["curve"] if loss <= best), None)
        cells = [method, f"{run['mean_ratio']:.0f}", f"{run['rate']:g}", f"{run['loss']:.3f}"]
        rows.append([*cells, f"{100 * (run['loss'] / best - 1):+.1f} %", str(reached or "")])
    titles = ["method", "fewer bytes", "rate", "loss", "to the best dense", "as low after"]
    print(markdown(titles, rows))


STUDY = Study(
    folder="convergence",
    file="large",
    rows=METHODS,
    show=show,
    tasks=("large",),
    steps=1000,
    seeds=1,
    workers=4,
    rates=(0.5, 1.0, 2.0),
    devices=False,
    column=Curve,
    smoke=("dense, Adam", "4 local steps in 4 fragments, signs"),
)
