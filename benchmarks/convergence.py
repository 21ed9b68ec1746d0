"""Run a study, and show its table.

A study is an entry of `STUDIES`: rows, tasks, steps, seeds, learning rates, and a table.
The learning rate of a row is the best of a grid, on the first seed; the other seeds run at that
rate. Results are written after each run, and runs whose results are there are not repeated.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import tables
from _record import RESULTS, folder_at, head, write
from held_out import HELD_OUT
from methods import BY_NAME, ENDS, FOUNDING, METHODS, Method
from program import Program, run, score
from tasks import TASKS, WORKERS, Task


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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is not said is the study's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("study", nargs="?", default="methods", choices=STUDIES)
    add("--tasks", help="which tasks, by comma")
    add("--methods", default="", help="parts of names, by semicolon; all if empty")
    add("--steps", type=int, help="optimizer steps of each run")
    add("--seeds", type=int, help="how many seeds")
    add("--rates", help="the learning rates tried, by comma, in units of the task's own")
    add("--out", type=folder_at, default=RESULTS / "convergence", help="folder for the results")
    add("--name", help="of the file written")
    add("--show", action="store_true", help="run nothing, show what is there")
    add("--smoke", action="store_true", help="a few steps of tiny models")
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    args.tasks = args.tasks.split(",") if args.tasks else list(study.tasks)
    args.methods = [word for word in args.methods.split(";") if word]
    args.rates = [float(rate) for rate in args.rates.split(",")] if args.rates else None
    args.steps = args.steps or (4 if args.smoke else study.steps)
    args.seeds = args.seeds or (1 if args.smoke else study.seeds)
    args.name = args.name or study.file or f"steps-{args.steps}"
    return args


WIDEST = 12
"""Rates that are tried at most, lest none of them trains."""


class Runner:
    """The runs of a study, of which only those are made that are not there."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.study = args, STUDIES[args.study]
        self.path = args.out / f"{args.name}.json"
        self.results: dict[str, Any] = {**head(), "workers": self.study.workers, "runs": []}
        if self.path.exists() and not args.smoke:
            self.results = json.loads(self.path.read_text())

    def train(self, task: Task, rows: list[Method]) -> None:
        """All rows on a task."""
        for method in rows:
            # Compiled when the first run needs it.
            make = functools.partial(Program, task, method, self.study.workers)
            program = functools.cache(make)
            rates = self.args.rates or self.study.rates
            if self.args.smoke:
                rates = rates[:1]
            tried = [self.get(task, method, program, rate, 0) for rate in rates]
            sweeps = self.study.inside and not self.args.rates and not self.args.smoke
            while sweeps and len(rates) < WIDEST:
                rate = min(tried, key=score)["rate"]
                further = {min(rates): rate / 2, max(rates): 2 * rate}.get(rate)
                if further is None:
                    break
                rates = [*rates, further]
                tried.append(self.get(task, method, program, further, 0))
            rate = min(tried, key=score)["rate"]
            for seed in range(self.args.seeds):
                self.get(task, method, program, rate, seed)

    def get(
        self,
        task: Task,
        method: Method,
        program: Callable[[], Program],
        rate: float,
        seed: int,
    ) -> dict[str, Any]:
        """A run, as a record."""
        key = {"task": task.name, "method": method.name, "rate": rate, "seed": seed}
        key["steps"] = self.args.steps
        for record in self.results["runs"]:
            if all(record.get(name) == value for name, value in key.items()):
                return record
        record = run(program(), self.args.steps, rate, seed, self.study.curve)
        self.results["runs"].append(record)
        write(self.path, self.results)
        print({name: record[name] for name in (*key, "loss", "mean_ratio")}, flush=True)
        return record


def main(argv: list[str] | None = None) -> None:
    """Runs what is missing, and shows all that there is."""
    args = parse_args(argv)
    runner, study = Runner(args), STUDIES[args.study]

    def chosen(name: str) -> bool:
        if args.methods:
            return any(word in name for word in args.methods)
        return not args.smoke or name in study.smoke

    if not args.show:
        rows = [method for method in study.rows if chosen(method.name)]
        for name in args.tasks[: 1 if args.smoke else None]:
            runner.train((TASKS | HELD_OUT)[name](args.smoke), rows)
    print(study.tables(runner.results))
    print(f"of {runner.path}")


if __name__ == "__main__":
    main()
