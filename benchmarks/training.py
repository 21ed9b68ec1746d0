"""Every method: what it sends, and what becomes of training; the frontier of both."""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import markdown as table
from _record import save
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from methods import AXIS, METHODS, Method, Setting, Transformation, gradients_of, watched
from program import Program, Study, score
from tasks import Params, Task

TITLES = {"lm": "Language model, Adam", "digits": "Residual network on digits, SGD"}
COMMITTED = "steps-200"
"""The run of the figure in the documentation."""


def errors(task: Task, rows: list[Method], mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The relative error of the mean of one gradient, without memory, of each method.

    The gradient is that of a dense run after 50 steps; none for methods whose updates are no mean.
    """
    rows = [row for row in rows if row.exchange is not None and row.directs is None]
    if not rows:
        return
    program = Program(task, watched(METHODS[0]), 50, mesh)
    batches, at = task.batches(0, mesh.size), program.fresh(task.params(0))
    for batch in itertools.islice(batches, 51):
        at, _ = program.step(at, batch, task.rate / 2)
    own = gradients_of(at.state)
    exact = jax.tree.map(lambda g: g.mean(0), own)
    for row in rows:
        tx = row.mean(Setting(mesh.size, 50))

        def mean(rows: Params, tx: Transformation = tx) -> Params:
            own = jax.tree.map(lambda g: g[0], rows)
            return tx.update(own, tx.init(own))[0]

        mapped = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        difference = jax.tree.map(jnp.subtract, jax.jit(mapped)(own), exact)
        yield row.name, float(optax.tree.norm(difference) / optax.tree.norm(exact))


# Table


def chosen(runs: list[Any], task: str) -> dict[str, list[Any]]:
    """The runs of each method at its best rate, the longest there are."""
    out: dict[str, list[Any]] = {}
    for name in dict.fromkeys(r["method"] for r in runs if r["task"] == task):
        own = [r for r in runs if r["task"] == task and r["method"] == name]
        own = [r for r in own if r["steps"] == max(o["steps"] for o in own)]
        best = min((r for r in own if r["seed"] == 0), key=score)
        out[name] = [r for r in own if r["rate"] == best["rate"]]
    return out


def markdown(results: Any) -> str:
    """One row a method: what it sends, and what became of the training.

    A dense gradient in bfloat16 has half of the bytes that the ratio is of.
    """
    runs = results["runs"]
    by_task = {task: chosen(runs, task) for task in dict.fromkeys(r["task"] for r in runs)}
    known = {method.name: method for method in METHODS}
    columns = ["method", "published", "counted"]
    for task in by_task:
        columns += [f"{task}: ratio", "to bf16", "error", "loss", "to dense"]
        columns += ["accuracy"] * (task == "digits")
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for found in by_task.values() for name in found):
        told = (known[name].published, known[name].counted) if name in known else (None, None)
        cells = [name, *(f"{x:g}" if x else "" for x in told)]
        for task, found in by_task.items():
            error = results.get("errors", {}).get(task, {}).get(name)
            cells += cells_of(found.get(name, []), found.get("dense", []), error, task == "digits")
        rows.append(cells)
    return table(columns, rows)


def cells_of(own: list[Any], dense: list[Any], error: float | None, classes: bool) -> list[str]:
    """Those of a method on a task."""
    if not own:
        return [""] * (5 + classes)
    losses, ratio = [r["loss"] for r in own], own[0]["mean_ratio"]
    change = 100 * (np.mean(losses) / np.mean([r["loss"] for r in dense]) - 1)
    cells = [f"{ratio:.1f}", f"{ratio / 2:.1f}", f"{error:.2f}" if error else ""]
    cells += [f"{np.mean(losses):.3f} ± {np.ptp(losses) / 2:.3f}", f"{change:+.1f} %"]
    return cells + [f"{100 * np.mean([r['accuracy'] for r in own]):.1f} %" for _ in range(classes)]


# Figure


class Point(NamedTuple):
    """A method in the figure."""

    number: int  # of the method, the same in all panels
    ratio: float
    change: float  # final loss relative to dense in per cent, the mean over seeds
    low: float  # the same of the best and the worst seed
    high: float


def points(runs: list[Any], task: str) -> list[Point]:
    """Every method of a task but dense."""
    rows = chosen(runs, task)
    dense = np.mean([r["loss"] for r in rows.pop("dense")])
    numbers = {method.name: number for number, method in enumerate(METHODS)}
    out: list[Point] = []
    for name, own in rows.items():
        changes = [100 * (r["loss"] / dense - 1) for r in own]
        ends = float(np.mean(changes)), min(changes), max(changes)
        out.append(Point(numbers[name], own[0]["mean_ratio"], *ends))
    return out


def best(listed: list[Point]) -> list[Point]:
    """The frontier: no other method has both a lower loss and a higher ratio."""
    out: list[Point] = []
    for point in sorted(listed, key=lambda p: (-p.ratio, p.change)):
        if not out or point.change < out[-1].change:
            out.append(point)
    return out[::-1]


def frontier(runs: list[Any]) -> Figure:
    """Final loss against compression ratio: a panel for each task, a number for each method."""
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    figure = Figure(figsize=(12, 6.4 * len(tasks) + 3.6))
    FigureCanvasAgg(figure)  # which measures text
    *panels, below = figure.subplots(len(tasks) + 1, 1, height_ratios=[6.4] * len(tasks) + [2.9])
    figure.subplots_adjust(left=0.07, right=0.985, top=0.97, bottom=0.01)
    for axes, task in zip(panels, tasks, strict=True):
        panel(axes, points(runs, task))
        steps = max(r["steps"] for r in runs if r["task"] == task)
        axes.set_title(f"{TITLES.get(task, task)}: loss after {steps} steps")
    ran = {r["method"] for r in runs}
    names = [(i, m.name) for i, m in enumerate(METHODS) if m.name in ran and m.name != "dense"]
    below.axis("off")
    height, columns = -(-len(names) // 4), 4
    for index, (number, name) in enumerate(names):
        column, row = divmod(index, height)
        x, y = column / columns, 0.95 - row / height
        below.text(x + 0.025, y, str(number), ha="right", va="top", weight="bold", fontsize=9)
        below.text(x + 0.033, y, name, va="top", fontsize=9)
    return figure


def panel(axes: Axes, listed: list[Point]) -> None:
    """Draws one task."""
    top = ceiling([p.change for p in listed])
    inside, edge = [p for p in listed if p.change <= top], best(listed)
    bottom = min(0.0, *(p.low for p in inside))
    height = top - bottom
    above = top + 0.06 * height
    axes.set(xscale="log", ylim=(bottom - 0.06 * height, top + 0.13 * height))
    axes.set_xlim(1, 1.9 * max(p.ratio for p in listed))
    axes.set_xlabel("compression ratio: bytes of the dense gradient / bytes sent")
    axes.set_ylabel("held-out loss relative to dense, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both")
    axes.axhline(0, color="black", linewidth=1)
    axes.annotate("dense", (1, 0), (4, 3), textcoords="offset points")
    stairs = [(1.0, edge[0].change)]
    for point in edge:
        stairs += [(stairs[-1][0], point.change), (point.ratio, point.change)]
    axes.plot(*zip(*stairs, strict=True), color="C1", zorder=2, label="frontier")
    for point in inside:
        ends = point.low, min(point.high, top)
        axes.plot([point.ratio] * 2, ends, color="0.75", linewidth=1, zorder=1)
    for point in listed:
        color, marker = "C1" if point in edge else "C0", "o" if point in inside else "^"
        axes.plot(point.ratio, min(point.change, above), marker, color=color, markersize=6)
    axes.plot([], [], color="0.75", label="from the best seed to the worst")
    axes.plot([], [], "^", color="C0", label="above the panel, at the loss given")
    axes.legend(loc="lower right")
    number_all(axes, [p._replace(change=min(p.change, above)) for p in listed], listed, top)


def ceiling(changes: Sequence[float]) -> float:
    """Where a panel ends, so that a few bad results do not press the others together."""
    changes = [change for change in changes if np.isfinite(change)]
    most, usual = max(changes), float(np.quantile(changes, 0.75))
    limit = usual + 3 * (usual - float(np.quantile(changes, 0.25)))
    return most if most <= limit else max(c for c in changes if c <= limit)


def number_all(axes: Axes, drawn: list[Point], listed: list[Point], top: float) -> None:
    """Writes the number of each point where nothing else is: near it, or at the end of a line."""
    canvas: Any = axes.get_figure()
    canvas.draw_without_rendering()
    at = [axes.transData.transform((p.ratio, p.change)) for p in drawn]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in at]
    legend: Any = axes.get_legend()
    taken.append(legend.get_window_extent())
    around = [(np.cos(a), np.sin(a)) for a in np.linspace(0, 2 * np.pi, 16, endpoint=False)]
    for point, (x, y) in zip(listed, at, strict=True):
        text = str(point.number) + (f": {point.change:+.0f} %" if point.change > top else "")
        wide = 6.5 * len(text) + 4
        for away, (dx, dy) in itertools.product(range(12, 100, 4), around):
            place = x + (away + wide / 2) * dx, y + away * dy
            box = Bbox.from_bounds(place[0] - wide / 2, place[1] - 7, wide, 14)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6} if away > 16 else None
                spot: Any = axes.transData.inverted().transform(place)
                centered: Any = {"ha": "center", "va": "center", "fontsize": 8}
                ends = (point.ratio, min(point.change, drawn[listed.index(point)].change))
                axes.annotate(text, ends, spot, arrowprops=line, **centered)
                break


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table of all tasks, and the figure."""
    print(markdown(results))
    picture = "frontier.png" if name == COMMITTED else f"frontier-{name}.png"
    save(frontier(results["runs"]), folder, picture)


STUDY = Study(
    folder="convergence",
    file="",
    rows=METHODS,
    show=show,
    tasks=("lm", "digits"),
    rates=(0.5, 1.0, 2.0),
    errors=errors,
    smoke=("dense", "PowerSGD rank 1"),
)
