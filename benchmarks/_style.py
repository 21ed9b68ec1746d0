"""How figures look: one color for one kind of method, names at the ends of curves, light and dark.

A figure is an SVG file of 6 inches with text of 10 points, which a page may show at 400 pixels. Its
colors are those of a light page, and a style sheet in the file has others for a dark one. They were
searched so that any two differ as much as they can for usual eyes and for those that see no red or
no green; tests measure it.
"""

import io
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

WIDTH, POINTS, MOST = 6.0, 10, 5
"""Inches, the size of text, and how many curves a panel has at most."""
PAPER, INK, MUTED, GRID = "#ffffff", "#1f2328", "#6e7781", "#dfe3e8"
FAINT = "#b9c0c8"
PEER, LOW_RANK, SPARSE, LOCAL = "#a3492d", "#1672d3", "#239967", "#8c147e"
BASIS, FEW_BITS = "#148fc1", "#a47f0f"
DARK = {
    PAPER: "#1e2129",
    INK: "#e6edf3",
    MUTED: "#838c96",
    GRID: "#3a414d",
    FAINT: "#5d6673",
    PEER: "#f05a29",
    LOW_RANK: "#5faef3",
    SPARSE: "#74daac",
    LOCAL: "#d656c1",
    BASIS: "#85d5f5",
    FEW_BITS: "#e8d071",
}
"""Of each color of a light page that of a dark one."""

KINDS = (
    (r"torch|ddp|^lax\.", PEER),
    (r"^bf16|^bfloat16|^dense.*(bfloat16|16 bits)", MUTED),
    (r"^dense|^memory copy|bound$|float32$", INK),
    (r"local|loco\b|fragments", LOCAL),
    (r"power|acp-|dion", LOW_RANK),
    (r"\bfft\b|\bdct\b|\bdemo\b", BASIS),
    (r"top-k|random|budget|\dx\b|dgc|redsync|scalecom|shared|int32", SPARSE),
)
"""Methods by their names, the first that fits; all others send a few bits for each value."""
DASHES = ("-", (0, (5, 1.6)), (0, (1, 1.4)))
PATCH: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
"""Under a name that crosses a curve."""
RC: dict[Any, Any] = {
    "figure.constrained_layout.h_pad": 0.05,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": POINTS,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": POINTS,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "font.size": POINTS,
    "legend.frameon": False,
    "legend.fontsize": POINTS,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": POINTS,
    "ytick.labelsize": POINTS,
    "svg.hashsalt": "fftgrad",
}
mpl.rcParams.update(RC)


def figure(height: float) -> Figure:
    """An empty one of the usual width."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def color(name: str) -> str:
    """That of a method, the same in each figure."""
    own = name.lower()
    return next((found for form, found in KINDS if re.search(form, own)), FEW_BITS)


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Color and dashes of some methods: those of one kind in a figure differ by their dashes."""
    out, used = dict[str, dict[str, Any]](), dict[str, int]()
    for name in dict.fromkeys(names):
        own = color(name)
        out[name] = {"color": own, "linestyle": DASHES[used.setdefault(own, 0) % len(DASHES)]}
        used[own] += 1
    return out


def label_ends(axes: Axes, names: Mapping[str, Line2D], room: float = 0.0) -> None:
    """Writes each name behind the last point of its curve, and above or below where it is taken.

    `room` is how much wider the panel becomes for them; without it they are written at its right.
    """
    if room:
        low, high = axes.get_xlim()
        wider = high * (high / low) ** room if axes.get_xscale() == "log" else high + room * high
        axes.set_xlim(low, wider)
    canvas: Any = axes.get_figure()
    canvas.draw_without_rendering()
    to_points = 72 / canvas.dpi
    ends = {name: _end(line) for name, line in names.items()}
    heights = {name: to_points * _height(axes, end) for name, end in ends.items()}
    bottom, top = (to_points * y for y in (axes.bbox.y0, axes.bbox.y1))
    for name, height in apart(heights, 1.2 * POINTS, bottom, top).items():
        (x, y), at_edge = ends[name], not room
        place = (1.0, y) if at_edge else (x, y)
        axes.annotate(
            name,
            place,
            (5, height - heights[name]),
            xycoords=("axes fraction", "data") if at_edge else "data",
            textcoords="offset points",
            color=names[name].get_color(),
            va="center",
            annotation_clip=False,
            bbox=PATCH,
        )


def apart(
    heights: Mapping[str, float], least: float, bottom: float, top: float
) -> dict[str, float]:
    """Heights of labels, in their order, that differ by so much at least and stay inside."""
    names = sorted(heights, key=lambda name: heights[name])
    out = [min(max(heights[name], bottom), top) for name in names]
    for _ in range(50):
        for i in range(len(out) - 1):
            missing = least - (out[i + 1] - out[i])
            if missing > 0:
                out[i] -= missing / 2
                out[i + 1] += missing / 2
        out = [
            min(max(y, bottom + i * least), top - (len(out) - 1 - i) * least)
            for i, y in enumerate(out)
        ]
    return dict(zip(names, out, strict=True))


def _end(line: Line2D) -> tuple[float, float]:
    x, y = (np.asarray(side, np.float64) for side in (line.get_xdata(), line.get_ydata()))
    return float(x[-1]), float(y[-1])


def _height(axes: Axes, point: tuple[float, float]) -> float:
    low, high = sorted(axes.get_ylim())
    inside = min(max(point[1], low), high)
    return float(axes.transData.transform((point[0], inside))[1])


def svg(drawn: Figure) -> str:
    """The file, with a style sheet for dark pages."""
    out = io.StringIO()
    drawn.savefig(out, format="svg", metadata={"Date": None})
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    head, mark, rest = out.getvalue().partition("<defs>")
    return re.sub(r" +$", "", f"{head}{sheet}{mark}{rest}", flags=re.MULTILINE)


def write(drawn: Figure, path: pathlib.Path) -> None:
    """Writes it as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(drawn), encoding="utf-8")
