"""The loss at the end of training, on tasks that nobody chose settings on.

Settings are chosen on the tasks "lm", "prose" and "digits by Adam" (`--tasks`). Then each row runs
once on the tasks of `held_out.py`. The learning rate of every row, dense too, is swept by factors
of two until the best has a worse one on both sides. Dense is the better of Adam and Muon.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from _record import markdown
from methods import FEEDBACK, Method, local_filled, renamed, times, two_stages
from program import Study
from training import chosen

import fftgrad as fg

DENSE = ("dense, Adam", "dense, Muon")


def filled(name: str, ratio: float, **options: Any) -> Method:
    """A message filled with the largest, behind feedback."""
    exchange = fg.AllGather(fg.Budget(ratio=ratio))
    return Method(name, fg.Recipe(exchange, FEEDBACK), **options)


def adam(nu: float) -> Any:
    """Ours, with that share of the average."""
    return functools.partial(fg.optimizers.feedback_adam, nu=nu)


def muon(lead: float) -> Any:
    """Ours, with so much of the normalized gradient."""
    return functools.partial(fg.optimizers.feedback_muon, lead=lead)


METHODS: list[Method] = [
    renamed("dense, Adam", "dense"),
    renamed("dense, Muon", "dense", muon=True),
    filled("100x, Muon, lead 0.5", 100, optimizer=muon(0.5)),
    filled("30x, Muon, lead 0.3", 30, optimizer=muon(0.3)),
    filled("100x, Adam, nu 0.5", 100, optimizer=adam(0.5)),
    filled("300x, Muon, lead 0.5", 300, optimizer=muon(0.5)),
    filled("30x, Adam, nu 0.7", 30, optimizer=adam(0.7)),
    renamed("dense, Muon, lead 0.3", "dense", optimizer=muon(0.3)),
    renamed("dense, Adam, nu 0.5", "dense", optimizer=adam(0.5)),
    *(
        two_stages(f"two stages {ratio}x, Muon, lead {lead}", ratio, muon(lead))
        for ratio, lead in ((12, 0.3), (25, 0.3), (50, 0.3), (100, 0.3), (50, 0.5), (100, 0.5))
    ),
    *(
        two_stages(f"eigenbasis {ratio}x, Muon, lead 0.3", ratio, muon(0.3), turned=True)
        for ratio in (25, 50, 100)
    ),
    *(
        two_stages(f"two stages {ratio}x, Adam, nu {nu}", ratio, adam(nu))
        for ratio, nu in ((25, 0.7), (50, 0.7), (25, 0.5))
    ),
    filled("100x, Muon", 100, muon=True),
    filled("30x, Muon", 30, muon=True),
    filled("100x, Adam without momentum", 100, momentum=False),
    renamed("EDEN 1 bit, Muon, lead 0.3", "EDEN 1 bit (DRIVE)", optimizer=muon(0.3)),
    renamed("EDEN 1 bit, Adam", "EDEN 1 bit (DRIVE)"),
    renamed("PowerSGD rank 4, Muon, lead 0.3", "PowerSGD rank 4", optimizer=muon(0.3)),
    renamed("PowerSGD rank 4, Adam, nu 0.7", "PowerSGD rank 4", optimizer=adam(0.7)),
    local_filled("4 local steps of Muon, 25x", 4, 25, muon=True),
    local_filled("4 local steps of Adam, 25x", 4, 25),
]


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table."""
    del folder, name
    print(tables(results))


def tables(results: dict[str, Any], methods: Sequence[Method] = METHODS) -> str:
    """Of each row and task the loss, its distance from the best dense, and the rate."""
    runs = results["runs"]
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    found = {task: chosen(runs, task) for task in tasks}
    rows: list[list[str]] = []
    for row in methods:
        own = [run for run in runs if run["method"] == row.name]
        if own:
            cells = [cell_of(found[task], row.name) for task in tasks]
            ran = results["workers"]
            rows.append([row.name, *(fewer(row, own, w, ran) for w in (8, 64)), *cells])
    return markdown(["method", "on 8 links", "on 64", *tasks], rows)


def fewer(row: Method, runs: Sequence[Any], workers: int, ran: int) -> str:
    """How many times fewer bytes cross a link, from the least to the most."""
    ratios = sorted(row.on_link(run, workers, ran) for run in runs)
    return " to ".join(dict.fromkeys(times(ratio) for ratio in (ratios[0], ratios[-1])))


def means(found: dict[str, list[Any]], name: str) -> float:
    """The mean loss of a row, over its seeds."""
    return float(np.mean([run["loss"] for run in found[name]])) if name in found else float("inf")


def cell_of(found: dict[str, list[Any]], method: str) -> str:
    """That of a row on a task; the rate is in units of the task's."""
    if method not in found:
        return ""
    loss, dense = means(found, method), min(means(found, name) for name in DENSE)
    compared = method not in DENSE and np.isfinite(dense)
    change = f", {100 * (loss / dense - 1):+.1f} %" if compared else ""
    return f"{loss:.3f}{change} ({found[method][0]['rate']:g})"


STUDY = Study(
    folder="convergence",
    file="ends",
    rows=METHODS,
    show=show,
    tasks=("photographs", "names", "nnx", "fine-tuning"),
    steps=1000,
    rates=(0.5, 1.0, 2.0),
    inside=True,
    devices=False,
    smoke=("dense, Adam", "100x, Muon, lead 0.5", "4 local steps of Adam, 25x"),
)
