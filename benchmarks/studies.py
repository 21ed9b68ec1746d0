"""The studies of `convergence.py`: what is trained with which methods.

A study is an entry of `STUDIES`: rows, tasks, steps, seeds, learning rates, and the table of its
results.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tables
from methods import BY_NAME, ENDS, FOUNDING, METHODS, Method
from tasks import WORKERS


@dataclasses.dataclass(frozen=True)
class Study:
    """Rows, and how each is run and shown."""

    file: str  # of the results; empty for one by the number of steps
    rows: list[Method]  # what is trained with
    tables: Callable[[dict[str, Any]], str]  # of the results, in Markdown
    smoke: tuple[str, ...]  # the rows of a smoke run
    tasks: tuple[str, ...] = ("lm",)  # names of what is trained
    steps: int = 1000
    seeds: int = 2
    workers: int = WORKERS
    # learning rates tried on the first seed, in units of the task's own
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    inside: bool = False  # whether others are tried until the best has a neighbour on both sides
    curve: bool = False  # whether held-out losses are kept by step


STUDIES: dict[str, Study] = {
    # Methods on a tuning task.
    "methods": Study(
        "",
        METHODS,
        functools.partial(tables.ends, methods=METHODS),
        smoke=("dense", "PowerSGD rank 4"),
        steps=200,
    ),
    # The loss at the end on held-out tasks. The rate of each row, dense too, is swept by factors of
    # two until the best has a worse one on both sides. Dense is the better of Adam and Muon.
    "ends": Study(
        "ends",
        ENDS,
        tables.ends,
        smoke=("dense, Adam", "100x, Muon, lead 0.5", "4 local steps of Muon, 25x"),
        tasks=("photographs", "names", "nnx", "fine-tuning"),
        inside=True,
    ),
    # The founding papers' codecs before Adam, as published, and before Muon.
    "seeds": Study(
        "seeds",
        FOUNDING,
        tables.founding,
        smoke=("FFT 64, 30x, Muon, lead 0.3",),
        tasks=("photographs", "names"),
        rates=(2.0, 4.0),
        inside=True,
    ),
    # How a model of 5.4 million parameters learns, by step; `slow_network.py` says how long a step
    # takes over a link. No setting was chosen on this task.
    "seconds": Study(
        "seconds",
        [BY_NAME[name] for name in tables.LARGE],
        tables.seconds,
        smoke=("dense, Adam", "two stages 25x, Muon, lead 0.3"),
        tasks=("large",),
        seeds=1,
        workers=4,
        curve=True,
    ),
}
