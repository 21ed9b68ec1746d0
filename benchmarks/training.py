"""Every method: what it sends, and what becomes of training; the frontier of both."""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import _style as style
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
from methods import (
    AXIS,
    METHODS,
    ROWS,
    Method,
    Setting,
    Transformation,
    gradients_of,
    times,
    watched,
)
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
    """One row a method: how many times fewer bytes it sends, and what became of the training."""
    runs = results["runs"]
    by_task = {task: chosen(runs, task) for task in dict.fromkeys(r["task"] for r in runs)}
    columns = ["method", "published", "counted"]
    for task in by_task:
        columns += [f"{task}: on 8 links", "on 64", "error", "loss", "to dense"]
        columns += ["accuracy"] * (task == "digits")
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for found in by_task.values() for name in found):
        told = (ROWS[name].published, ROWS[name].counted) if name in ROWS else (None, None)
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
    losses = [r["loss"] for r in own]
    near, far = (ROWS[own[0]["method"]].on_link(own[0], workers) for workers in (8, 64))
    change = 100 * (np.mean(losses) / np.mean([r["loss"] for r in dense]) - 1)
    cells = [times(near), times(far), f"{error:.2f}" if error else ""]
    cells += [f"{np.mean(losses):.3f} ± {np.ptp(losses) / 2:.3f}", f"{change:+.1f} %"]
    return cells + [f"{100 * np.mean([r['accuracy'] for r in own]):.1f} %" for _ in range(classes)]


# Figure


class Point(NamedTuple):
    """A method in the figure."""

    name: str
    ratio: float
    change: float  # final loss relative to dense in per cent, the mean over seeds
    low: float  # the same of the best and the worst seed
    high: float


NAMED = (
    "bfloat16",
    "TernGrad",
    "PowerSGD rank 4",
    "DGC 1 %",
    "top-k 1 %, 4 bits",
    "majority vote",
)
"""Methods with a name in the figure, beside the frontier's; the table has all."""
MOST = 12
"""How many have one at most."""


def points(runs: list[Any], task: str) -> list[Point]:
    """Every method of a task but dense."""
    rows = chosen(runs, task)
    dense = np.mean([r["loss"] for r in rows.pop("dense")])
    out: list[Point] = []
    for name, own in rows.items():
        changes = [100 * (r["loss"] / dense - 1) for r in own]
        ends = float(np.mean(changes)), min(changes), max(changes)
        out.append(Point(name, ROWS[name].on_link(own[0], 8), *ends))
    return out


def best(listed: list[Point]) -> list[Point]:
    """The frontier: no other method has both a lower loss and a higher ratio."""
    out: list[Point] = []
    for point in sorted(listed, key=lambda p: (-p.ratio, p.change)):
        if not out or point.change < out[-1].change:
            out.append(point)
    return out[::-1]


def frontier(runs: list[Any]) -> Figure:
    """Final loss against compression ratio: a panel for each task."""
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    figure = style.figure(0.3 + 4.1 * len(tasks))
    FigureCanvasAgg(figure)  # which measures text
    panels: Any = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
    for axes, task in zip(panels, tasks, strict=True):
        steps = max(r["steps"] for r in runs if r["task"] == task)
        axes.set_title(f"{TITLES.get(task, task)}: loss after {steps} steps")
        axes.set_ylabel("held-out loss above dense, %")
        listed = points(runs, task)
        name_all(axes, *panel(axes, listed))
    panels[-1].set_xlabel("times fewer bytes on the links of 8 workers")
    return figure


def panel(axes: Axes, listed: list[Point]) -> tuple[list[Point], list[Point]]:
    """Draws one task; returns the points to name, and all that are in the panel."""
    top = ceiling([p.change for p in listed])
    inside, edge = [p for p in listed if p.change <= top], best(listed)
    bottom = min(0.0, *(p.change for p in inside))
    height = top - bottom
    axes.set(xscale="log", ylim=(bottom - 0.14 * height, top + 0.08 * height))
    axes.set_xlim(1, 1.9 * max(p.ratio for p in listed))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color=style.INK, linewidth=1)
    stairs = [(1.0, edge[0].change)]
    for point in edge:
        stairs += [(stairs[-1][0], point.change), (point.ratio, point.change)]
    axes.plot(*zip(*stairs, strict=True), color=style.MUTED, linewidth=1, zorder=2)
    shown = [p for p in inside if p in edge or p.name in NAMED][:MOST]
    for point in inside:
        color = style.color(point.name) if point in shown else style.FAINT
        size, order = (7, 4) if point in shown else (4.5, 3)
        axes.plot(point.ratio, point.change, "o", color=color, markersize=size, zorder=order)
    return shown, inside


def ceiling(changes: Sequence[float]) -> float:
    """Where a panel ends, so that a few bad results do not press the others together."""
    changes = [change for change in changes if np.isfinite(change)]
    most, usual = max(changes), float(np.quantile(changes, 0.75))
    limit = usual + 3 * (usual - float(np.quantile(changes, 0.25)))
    return most if most <= limit else max(c for c in changes if c <= limit)


def name_all(axes: Axes, named: list[Point], inside: list[Point]) -> None:
    """Writes names where nothing else is: near the point, or at the end of a line."""
    canvas: Any = axes.get_figure()
    canvas.draw_without_rendering()
    scale, panel = canvas.dpi / 72, axes.get_window_extent()
    at = {p.name: axes.transData.transform((p.ratio, p.change)) for p in inside}
    taken = [
        Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in at.values()
    ]
    around = [(np.cos(a), np.sin(a)) for a in np.linspace(0, 2 * np.pi, 24, endpoint=False)]
    high = 1.25 * style.POINTS * scale
    for point in named:
        x, y = at[point.name]
        wide = 0.6 * style.POINTS * scale * len(point.name)
        for away, (dx, dy) in itertools.product(np.arange(10, 150, 4) * scale, around):
            place = x + (away + wide / 2) * dx, y + away * dy
            box = Bbox.from_bounds(place[0] - wide / 2, place[1] - high / 2, wide, high)
            if any(box.overlaps(other) for other in taken) or not _within(box, panel):
                continue
            taken.append(box)
            far = away > 16 * scale
            line = {"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.7} if far else None
            spot: Any = axes.transData.inverted().transform(place)
            axes.annotate(
                point.name,
                (point.ratio, point.change),
                spot,
                arrowprops=line,
                ha="center",
                va="center",
                color=style.color(point.name),
                bbox=style.PATCH,
                zorder=5,
            )
            break


def _within(box: Bbox, panel: Any) -> bool:
    return box.x0 >= panel.x0 and box.x1 <= panel.x1 and box.y0 >= panel.y0 and box.y1 <= panel.y1


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table of all tasks, and the figure."""
    print(markdown(results))
    picture = "frontier" if name == COMMITTED else f"frontier-{name}"
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
