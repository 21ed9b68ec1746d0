"""How a model of 5.4 million parameters learns, by step, without a link's limits.

`slow_network.py --workload large` says how long a step takes over a link; the product is the time
in which a loss is reached. No setting was chosen on this task.
"""

import itertools
import pathlib
from typing import Any, NamedTuple

import _style as style
import links
import numpy as np
from _record import RESULTS, markdown, save
from _style import label_ends, styles
from ends import DENSE, adam, filled, means, muon
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from methods import POWER_SGD, Method, local_filled, renamed, times, two_stages
from program import Column, Point, Study
from tasks import Batch
from training import chosen

import fftgrad as fg

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
        return {"assessed": self.losses}


METHODS: list[Method] = [
    renamed("dense, Adam", "dense"),
    renamed("dense, Muon", "dense", muon=True),
    filled("100x, Muon, lead 0.5", 100, optimizer=muon(0.5)),
    filled("30x, Muon, lead 0.3", 30, optimizer=muon(0.3)),
    Method("EDEN 1 bit, Muon, lead 0.3", fg.methods.eden(bits=1), optimizer=muon(0.3)),
    filled("100x, Adam, nu 0.5", 100, optimizer=adam(0.5)),
    local_filled("4 local steps of Muon, 25x", 4, 25, muon=True),
    POWER_SGD,
    renamed("PowerSGD rank 4, Adam, nu 0.7", "PowerSGD rank 4", optimizer=adam(0.7)),
    renamed("PowerSGD rank 4, Muon, lead 0.3", "PowerSGD rank 4", optimizer=muon(0.3)),
    two_stages("two stages 25x, Muon, lead 0.3", 25, muon(0.3)),
    renamed("4 local steps in 4 fragments, signs", "4 local steps in 4 fragments, sign"),
]


LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
SLOW = RESULTS / "slow_network"


class Timed(NamedTuple):
    """Something that was timed over links, and how it learns."""

    label: str
    row: str
    method: str  # of `slow_network.py`
    shown: str = ""  # its name in the figures, if it is in them


TIMED = (
    Timed("dense Adam, float32", "dense, Adam", "dense"),
    Timed("dense Adam, bfloat16", "dense, Adam", "bf16", "dense Adam, 16 bits"),
    Timed("dense Muon, float32", "dense, Muon", "dense-muon"),
    Timed("dense Muon, bfloat16", "dense, Muon", "bf16-muon", "dense Muon, 16 bits"),
    Timed(
        "feedback_adam, PowerSGD",
        "PowerSGD rank 4, Adam, nu 0.7",
        "adam-powersgd",
        "fftgrad: PowerSGD, Adam",
    ),
    Timed("feedback_muon, PowerSGD", "PowerSGD rank 4, Muon, lead 0.3", "muon-powersgd"),
    Timed("feedback_muon, 100x", "100x, Muon, lead 0.5", "muon-100x", "fftgrad: budget 100x, Muon"),
    Timed(
        "feedback_muon, two stages 25x",
        "two stages 25x, Muon, lead 0.3",
        "muon-two-25x",
        "fftgrad: two stages 25x, Muon",
    ),
    Timed("4 local steps of Muon, 100x", "4 local steps of Muon, 25x", "muon-local-4"),
    Timed("feedback_muon, EDEN", "EDEN 1 bit, Muon, lead 0.3", "muon-eden"),
    Timed(
        "PyTorch's PowerSGD, Adam", "PowerSGD rank 4", "torch-powersgd", "PyTorch: PowerSGD, Adam"
    ),
)
"""What was timed over a link; each is shown where its losses are there too."""


def reached(curve: list[Any], loss: float) -> float | None:
    """The step at which a curve is as low, between two assessments along a straight line."""
    if curve[0][1] <= loss:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            return after - (after - before) * (loss - low) / (high - low)
    return None


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The tables, and the curves."""
    del name
    print(tables(results))
    found = rows_of(results)
    save(figure(found), folder, "seconds_to_end")
    save(hero(found), folder, "hero")


def rows_of(results: dict[str, Any]) -> dict[str, Any]:
    """The run of each row."""
    return {row: runs[0] for row, runs in chosen(results["runs"], "large").items()}


def tables(results: dict[str, Any]) -> str:
    """Of each row the loss; and the seconds to the losses of both dense rows."""
    found = rows_of(results)
    best = min(means({row: [run] for row, run in found.items()}, row) for row in DENSE)
    rows: list[list[str]] = []
    known = {row.name: row for row in STUDY.rows}
    for method, run in found.items():
        row, ran = known[method], results["workers"]
        cells = [method, *(times(row.on_link(run, w, ran)) for w in (ran, 64))]
        cells += [f"{run['rate']:g}", f"{run['loss']:.3f}"]
        rows.append([*cells, f"{100 * (run['loss'] / best - 1):+.1f} %"])
    losses = markdown(["method", "on 4 links", "on 64", "rate", "loss", "to the best dense"], rows)
    return f"{losses}\n\n{markdown(*products(found))}"


def products(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: the steps to each dense row's loss, times the seconds of a step."""
    titles, rows = ["", "steps"], list[list[str]]()
    goals = [name for name in DENSE if name in found]
    for link in LINKS.values():
        titles += [f"s a step, {link}", *(f"to the loss of {goal}" for goal in goals)]
    taken = {link: links.methods(SLOW, f"large-{link}") for link in LINKS}
    for timed in (timed for timed in TIMED if timed.row in found):
        curve = found[timed.row]["assessed"]
        steps = [reached(curve, round(found[goal]["loss"], 4)) for goal in goals]
        cells = [timed.label, ", ".join(f"{count:.0f}" if count else "never" for count in steps)]
        for link in LINKS:
            each = taken[link].get(timed.method, {}).get("step_s")
            cells.append(f"{each:.2f}" if each else "")
            cells += [f"{count * each:.0f} s" if count and each else "" for count in steps]
        rows.append(cells)
    return titles, rows


def curves(found: dict[str, Any], link: str, axes: Axes) -> dict[str, Line2D]:
    """Held-out loss against seconds of training over a link, by the name in the figure."""
    taken = links.methods(SLOW, f"large-{link}")
    shown = [t for t in TIMED if t.shown and t.row in found and t.method in taken]
    looks = styles(timed.shown for timed in TIMED if timed.shown)
    lines = dict[str, Line2D]()
    for timed in shown:
        steps, losses = zip(*found[timed.row]["assessed"], strict=True)
        seconds = [count * taken[timed.method]["step_s"] for count in steps]
        (lines[timed.shown],) = axes.plot(seconds, losses, **looks[timed.shown])
    axes.set(xlabel="seconds of 1,000 steps", xscale="log", ylabel="held-out loss")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return lines


def figure(found: dict[str, Any]) -> Figure:
    """A panel for each link."""
    out = style.figure(6.4)
    for axes, (link, title) in zip(out.subplots(2, 1, sharey=True), LINKS.items(), strict=True):
        lines = curves(found, link, axes)
        axes.set_title(f"Links of {title}")
        axes.set_xlim(9, 3_000)
        label_ends(axes, lines, room=0.5)
    return out


def hero(found: dict[str, Any]) -> Figure:
    """The seconds until each has the loss at which dense Adam ends, over the slow link."""
    goal, taken = round(found[DENSE[0]]["loss"], 4), links.methods(SLOW, "large-100mbit")
    rows = list[tuple[float, str, str]]()
    for timed in (t for t in TIMED if t.shown and t.row in found and t.method in taken):
        steps, each = reached(found[timed.row]["assessed"], goal), taken[timed.method]["step_s"]
        if steps is None:
            last = found[timed.row]["assessed"][-1][0]
            rows.append((0.0, timed.shown, f"not in {last:,} steps, {last * each:,.0f} s"))
        else:
            rows.append((steps * each, timed.shown, f"{steps * each:,.0f} s"))
    rows.sort(key=lambda row: row[0] or np.inf)
    out = style.figure(0.75 + 0.42 * len(rows))
    axes = out.subplots()
    for place, (seconds, name, said) in enumerate(rows):
        axes.barh(place, seconds, height=0.62, color=style.color(name))
        told: Any = {"color": style.color(name), "weight": "bold", "va": "center"}
        axes.annotate(said, (seconds, place), (5, 0), textcoords="offset points", **told)
    axes.set_yticks(range(len(rows)), [name for _, name, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    out.suptitle(
        "Links of 100 Mbit/s: seconds until the loss at which dense Adam ends",
        fontsize=style.POINTS,
        weight="bold",
    )
    return out


STUDY = Study(
    folder="convergence",
    file="seconds",
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
