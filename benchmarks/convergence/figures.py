"""The table and the figure of what `run.py` wrote."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from methods import Method, methods, pmean

import fftgrad as fg

TITLES = {
    "lm": "Language model, Adam",
    "digits": "Residual network on digits, SGD",
}
NEAR = 0.09
"""How far above the frontier a point has its name, as a share of the height of the panel."""


# Table


def score(record: Any) -> float:
    """Lower is better; a run that diverged is worst."""
    return record["loss"] if np.isfinite(record["loss"]) else float("inf")


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
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    by_task = {task: chosen(runs, task) for task in tasks}
    by_name = {method.name: method for method in methods()}
    names = dict.fromkeys(name for rows in by_task.values() for name in rows)
    head = ["method", "published", "counted"]
    for task in tasks:
        head += [f"{task}: ratio", "to bf16", "error", "loss", "to dense"]
        head += ["accuracy"] * (task == "digits")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        method = by_name.get(name, Method(name, pmean(fg.AllReduce())))
        cells = [name, *(f"{x:g}" if x else "" for x in (method.published, method.counted))]
        for task in tasks:
            own, dense = (by_task[task].get(key, []) for key in (name, "dense"))
            width = 5 + (task == "digits")
            if not own:
                cells += [""] * width
                continue
            losses = [r["loss"] for r in own]
            change = 100 * (np.mean(losses) / np.mean([r["loss"] for r in dense]) - 1)
            error = results["errors"].get(task, {}).get(name)
            accuracy = [r["accuracy"] for r in own if "accuracy" in r]
            ratio = own[0]["mean_ratio"]
            cells += [f"{ratio:.1f}", f"{ratio / 2:.1f}", f"{error:.2f}" if error else ""]
            cells += [f"{np.mean(losses):.3f} ± {np.ptp(losses) / 2:.3f}", f"{change:+.1f} %"]
            cells += [f"{100 * np.mean(accuracy):.1f} %"] if accuracy else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Figure


class Point(NamedTuple):
    """A method in the figure.

    Attributes:
      number: of the method, the same in all panels.
      change: final loss relative to dense in per cent, the mean over seeds.
      low, high: the same of the best and the worst seed.
    """

    number: int
    name: str
    ratio: float
    change: float
    low: float
    high: float


def points(runs: list[Any], task: str) -> list[Point]:
    """Every method of a task but dense."""
    rows = chosen(runs, task)
    dense = np.mean([r["loss"] for r in rows["dense"]])
    numbers = {method.name: number for number, method in enumerate(methods())}
    out: list[Point] = []
    for name, own in rows.items():
        changes = [100 * (r["loss"] / dense - 1) for r in own]
        if name != "dense":
            number = numbers.get(name, len(numbers))
            mean = float(np.mean(changes))
            out.append(Point(number, name, own[0]["mean_ratio"], mean, min(changes), max(changes)))
    return out


def best(listed: list[Point]) -> list[Point]:
    """The frontier: no other method has both a lower loss and a higher ratio."""
    out: list[Point] = []
    for point in sorted(listed, key=lambda p: (-p.ratio, p.change)):
        if not out or point.change < out[-1].change:
            out.append(point)
    return out[::-1]


def frontier(runs: list[Any]) -> Figure:
    """Final loss against compression ratio, a panel for each task, a point for each method."""
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    figure = Figure(figsize=(12, 6.4 * len(tasks) + 2.6))
    FigureCanvasAgg(figure)  # which measures text
    heights = [6.4] * len(tasks) + [1.9]
    grid = figure.add_gridspec(
        len(tasks) + 1, 1, height_ratios=heights, left=0.07, right=0.985, top=0.97, bottom=0.01
    )
    numbered: dict[int, str] = {}
    for row, task in enumerate(tasks):
        axes = figure.add_subplot(grid[row])
        numbered |= panel(axes, points(runs, task))
        steps = max(r["steps"] for r in runs if r["task"] == task)
        axes.set_title(f"{TITLES.get(task, task)}: loss after {steps} steps")
    names_below(figure.add_subplot(grid[len(tasks)]), numbered)
    return figure


def panel(axes: Axes, listed: list[Point]) -> dict[int, str]:
    """Draws one task; returns the methods that have a number in place of their name."""
    top = ceiling([p.change for p in listed])
    inside = [p for p in listed if p.change <= top]
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

    edge = best(listed)
    stairs = [(1.0, edge[0].change)]
    for point in edge:
        stairs += [(stairs[-1][0], point.change), (point.ratio, point.change)]
    axes.plot(*zip(*stairs, strict=True), color="C1", zorder=2, label="frontier")
    for point in inside:
        ends = point.low, min(point.high, top)
        axes.plot([point.ratio] * 2, ends, color="0.75", linewidth=1, zorder=1)
    for group, color in ((edge, "C1"), ([p for p in inside if p not in edge], "C0")):
        at = [p.ratio for p in group], [p.change for p in group]
        axes.plot(*at, "o", color=color, markersize=6, zorder=3)
    outside = [p for p in listed if p.change > top]
    axes.plot([p.ratio for p in outside], [above] * len(outside), "^", color="C0", markersize=7)
    axes.plot([], [], color="0.75", label="from the best seed to the worst")
    if outside:
        axes.plot([], [], "^", color="C0", label="above the panel, at the loss given")
    axes.legend(loc="upper left")

    def gap(point: Point) -> float:
        return point.change - min(p.change for p in edge if p.ratio >= point.ratio)

    near = [p for p in inside if p in edge or gap(p) < NEAR * height]
    near.sort(key=lambda p: (p not in edge, gap(p)))
    lines = [*itertools.pairwise(stairs), ((1.0, 0.0), (axes.get_xlim()[1], 0.0))]
    shown = [p._replace(change=p.change if p.change <= top else above) for p in listed]
    return label(axes, shown, near, len(edge), outside, lines)


def ceiling(changes: Sequence[float]) -> float:
    """Where a panel ends, so that a few bad results do not press the others together."""
    changes = [change for change in changes if np.isfinite(change)]
    most, usual = max(changes), float(np.quantile(changes, 0.75))
    limit = usual + 3 * (usual - float(np.quantile(changes, 0.25)))
    return most if most <= limit else max(c for c in changes if c <= limit)


@dataclasses.dataclass
class Places:
    """Where there is room for text.

    Attributes:
      dots: the points of the panel, in pixels.
      taken: what no text may touch.
    """

    axes: Axes
    dots: list[Any]
    taken: list[Bbox]

    def put(self, text: str, at: tuple[float, float], *, far: bool) -> bool:
        """Writes a text near a point, where nothing else is; says whether it did.

        The text is nearer to its own point than to all others. If it may go far and there is no
        such place, a line leads to the point.
        """
        own = self.axes.transData.transform(at)
        figure: Any = self.axes.figure
        written = self.axes.annotate(
            text, at, (0, 0), textcoords="offset pixels", fontsize=9, zorder=4
        )
        size = written.get_window_extent(figure.canvas.get_renderer())
        for led in (False, True) if far else (False,):
            for dx, dy in offsets(size.width, size.height, led):
                box = Bbox.from_bounds(own[0] + dx, own[1] + dy, size.width, size.height)
                if self.is_free(box.padded(3)) and (led or self.is_nearest(own, box)):
                    self.taken.append(box)
                    written.set_position((dx, dy))
                    if led:
                        self.lead(own, box)
                    return True
        written.remove()
        return False

    def is_free(self, box: Bbox) -> bool:
        """Whether a box is within the panel and touches nothing."""
        frame = self.axes.bbox
        within = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
        return within and not any(meet(box, other) for other in self.taken)

    def is_nearest(self, own: Any, box: Bbox) -> bool:
        """Whether a point is clearly the nearest to a box."""
        away = [distance(dot, box) for dot in self.dots if not np.allclose(dot, own)]
        return all(1.5 * distance(own, box) < other for other in away)

    def lead(self, own: Any, box: Bbox) -> None:
        """Draws a line from a point to a box, around which no text goes."""
        ends = self.axes.transData.inverted().transform([own, np.clip(own, box.p0, box.p1)])
        self.axes.plot(*ends.T, color="0.4", linewidth=0.8, zorder=2)


def distance(dot: Any, box: Bbox) -> float:
    """From a point to the nearest point of a box."""
    return float(np.linalg.norm(dot - np.clip(dot, box.p0, box.p1)))


def meet(one: Bbox, other: Bbox) -> bool:
    """Whether two boxes have a point in common, be they as thin as a line."""
    across = one.xmin <= other.xmax and other.xmin <= one.xmax
    return across and one.ymin <= other.ymax and other.ymin <= one.ymax


def offsets(width: float, height: float, far: bool) -> Iterator[tuple[float, float]]:
    """Where to try a text of that size, from its point, in pixels; the nearest places first."""
    for away in (22, 32, 44, 58, 74, 92, 112) if far else (7, 11, 16):
        slant = 0.7 * away
        yield away, -height / 2
        yield -away - width, -height / 2
        yield -width / 2, away
        yield -width / 2, -away - height
        for dy in (slant, -slant - height):
            yield slant, dy
            yield -slant - width, dy


def label(
    axes: Axes,
    listed: list[Point],
    named: list[Point],
    first: int,
    outside: list[Point],
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]],
) -> dict[int, str]:
    """Writes names at points where they fit, and numbers at the others, which it returns.

    The first of the names are written even where they have to go far from their point.

    The lines are horizontal or vertical; no text crosses them.
    """
    figure: Any = axes.figure
    figure.canvas.draw()
    pixels = [axes.transData.transform((p.ratio, p.change)) for p in listed]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in pixels]
    taken += [Bbox(axes.transData.transform(line)) for line in lines]
    taken += [text.get_window_extent() for text in axes.texts]
    legend: Any = axes.get_legend()
    places = Places(axes, pixels, [*taken, legend.get_window_extent()])
    at = {p.number: (p.ratio, p.change) for p in listed}
    rest: dict[int, str] = {p.number: p.name for p in listed}
    exact = {p.number: p.change for p in outside}
    for point in named:
        if places.put(point.name, at[point.number], far=point in named[:first]):
            del rest[point.number]
    for point in listed:
        if point.number in rest:
            value = f": {exact[point.number]:+.0f} %" if point.number in exact else ""
            places.put(f"{point.number}{value}", at[point.number], far=True)
    return rest


def names_below(axes: Axes, numbered: dict[int, str]) -> None:
    """The names of the numbers, in columns."""
    axes.axis("off")
    items = sorted(numbered.items())
    columns = 4
    rows = -(-len(items) // columns)
    for index, (number, name) in enumerate(items):
        column, row = divmod(index, rows)
        x, y = column / columns, 0.95 - row / max(rows, 1)
        axes.text(x + 0.025, y, str(number), ha="right", va="top", weight="bold", fontsize=10)
        axes.text(x + 0.033, y, name, va="top", fontsize=10)
