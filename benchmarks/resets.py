"""What it costs to lose the residuals, and to keep them in bfloat16.

A checkpoint that leaves out what each worker has of its own starts again without residuals. Here
that happens never, once in the middle, every 50 and every 10 steps; all else goes on. With local
steps a worker has more of its own: the moments of its inner optimizer, and parameters that have
left the common ones.
"""

import pathlib
import statistics
from typing import Any

import _style as style
import optax
from _record import markdown, save
from _style import label_ends, styles
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from methods import AXIS, ROWS, Method, Setting, Transformation, fed_back, plain
from program import Column, Point, Reset, Study, score
from tasks import Batch

import fftgrad as fg

BFLOAT16, DECAYED = fg.ErrorFeedback(dtype="bfloat16"), fg.ErrorFeedback(decay=0.95)
TOP_K, MILLE, LOCAL = "top-k 1 % + EF", "top-k 0.1 % + EF", "diloco, 8 local steps"
VARIANTS = {
    "diloco, residual only": LOCAL,
    f"{TOP_K}, bfloat16": TOP_K,
    f"{MILLE}, bfloat16": MILLE,
    f"{TOP_K}, decay 0.95": TOP_K,
    f"{MILLE}, decay 0.95": MILLE,
}


def local(name: str) -> Method:
    """Eight local steps, then 3 % of what they changed in 4 bits."""

    def around(_: Setting, inner: Transformation) -> Transformation:
        return fg.optimizers.diloco(inner, optax.sgd(1.0), every=8, axis_name=AXIS)

    return Method(name, around=around, every=8, own=True)


def with_memory(name: str, memory: fg.Memory) -> Method:
    """A row of top-k with another memory."""
    share = 0.01 if name.startswith(TOP_K) else 0.001
    return fed_back(name, fg.methods.top_k(share, memory=memory))


def labels(steps: int) -> dict[int, str]:
    """How often there are resets, by the steps between two."""
    return {0: "never", steps // 2: "once", 50: "every 50", 10: "every 10"}


def resets_of(method: Method, steps: int) -> tuple[Reset, ...]:
    """All of them, for rows that are no variant; of the residual alone, those that are resets."""
    often = [min(every, steps // 2) for every in labels(steps)]
    if method.name == "diloco, residual only":
        return tuple(Reset(every, "residual") for every in often[1:])
    return tuple(Reset(every) for every in often[: 1 if method.name in VARIANTS else None])


class Residual(Column):
    """The length of the residual, at eight times."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lengths: list[float] = []

    def see(self, count: int, before: Point, after: Point) -> None:
        """Adds one where it is time."""
        if count % max(1, self.program.setting.steps // 8) == 0:
            self.lengths.append(round(float(fg.metrics(after.state)["residual"]), 5))

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """All of them."""
        return {"residual": self.lengths}


Rows = dict[str, dict[int, list[Any]]]


def chosen(runs: list[Any]) -> Rows:
    """The runs of each method at its rate, by resets."""
    out: Rows = {}
    for record in runs:
        name = VARIANTS.get(record["method"], record["method"])
        tried = [r for r in runs if r["method"] == name and r["seed"] == r["reset_every"] == 0]
        if tried and record["rate"] == min(tried, key=score)["rate"]:
            own = out.setdefault(record["method"], {})
            own.setdefault(record["reset_every"], []).append(record)
    return out


def changes(name: str, rows: Rows) -> dict[int, list[float]]:
    """The loss in per cent above that of the same seed without variant and resets."""
    base = {r["seed"]: r["loss"] for r in rows[VARIANTS.get(name, name)][0]}
    return {
        every: [100 * (r["loss"] / base[r["seed"]] - 1) for r in own if r["seed"] in base]
        for every, own in rows[name].items()
    }


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """What resets add to the loss: a table, and a figure with a line a method, a dot a seed."""
    del name
    print(tables(results))
    save(draw(results), folder, "resets")


def tables(results: dict[str, Any]) -> str:
    """Of each method the loss, and what resets add to it, a figure a seed."""
    rows, often = chosen(results["runs"]), labels(results["runs"][0]["steps"])
    cells: list[list[str]] = []
    for name in rows:
        found, base = changes(name, rows), rows[VARIANTS.get(name, name)][0]
        kept = rows[name].get(0, base)
        told = [f"{kept[0]['rate']:g}", f"{statistics.mean(r['loss'] for r in kept):.3f}"]
        says = [", ".join(f"{x:+.1f} %" for x in found.get(every, [])) for every in often]
        cells.append([name, *told, says[0] if name in VARIANTS else "", *says[1:]])
    columns = [
        "method",
        "rate",
        "loss",
        "to plain",
        *(f"reset {o}" for o in list(often.values())[1:]),
    ]
    return markdown(columns, cells)


def draw(results: dict[str, Any]) -> Figure:
    """What resets add to the loss, a line a method, a dot a seed; variants have a column."""
    rows, often = chosen(results["runs"]), labels(results["runs"][0]["steps"])
    figure = style.figure(4.2)
    axes = figure.subplots()
    looks, lines = styles(name for name in rows if name not in VARIANTS), dict[str, Line2D]()
    for name in looks:
        found = changes(name, rows)
        seeds = {i: found[every] for i, every in enumerate(often) if every in found}
        means = [statistics.mean(own) for own in seeds.values()]
        (lines[name],) = axes.plot(list(seeds), means, **looks[name])
        for at, own in seeds.items():
            axes.plot([at] * len(own), own, ".", color=looks[name]["color"])
    axes.set_xticks(range(len(often)), list(often.values()))
    axes.axhline(0, color=style.INK, linewidth=1)
    axes.set(xlabel="residuals lost", title="Held-out loss, % above residuals that are kept")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:g}")
    label_ends(axes, lines)
    return figure


STUDY = Study(
    folder="resets",
    file="resets",
    rows=[
        with_memory(TOP_K, fg.ErrorFeedback()),
        with_memory(MILLE, fg.ErrorFeedback()),
        plain(ROWS["signSGD + EF"]),
        local(LOCAL),
        local("diloco, residual only"),
        *(with_memory(f"{name}, bfloat16", BFLOAT16) for name in (TOP_K, MILLE)),
        *(with_memory(f"{name}, decay 0.95", DECAYED) for name in (TOP_K, MILLE)),
    ],
    show=show,
    steps=400,
    rates=(0.5, 1.0, 2.0),
    known={TOP_K: (0.5,), "signSGD + EF, no momentum": (1.0,)},
    variants=VARIANTS,
    resets=resets_of,
    column=Residual,
    smoke=(TOP_K, LOCAL, f"{TOP_K}, bfloat16"),
)
