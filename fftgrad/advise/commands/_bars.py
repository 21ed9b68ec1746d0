"""A figure of bars, each in parts."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

Bars = Mapping[str, Mapping[str, float]]
"""What each bar is called, and its parts."""


def draw(
    panels: Mapping[str, Bars],
    label: str,
    path: pathlib.Path,
    marks: Mapping[str, float] | None = None,
) -> None:
    """One panel beside the other; the first bar of a panel is at its top.

    A mark on a bar is the whole where it is less than the parts, some of which overlap.
    """
    most = max(len(bars) for bars in panels.values())
    figure = Figure(figsize=(1.5 + 4.5 * len(panels), 1.5 + 0.32 * most), layout="constrained")
    row: Sequence[Any] = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, bars) in zip(row, panels.items(), strict=True):
        names = list(bars)
        start = [0.0 for _ in names]
        for part in dict.fromkeys(part for parts in bars.values() for part in parts):
            width = [bars[name].get(part, 0.0) for name in names]
            axes.barh(names, width, left=start, label=part)
            start = [a + b for a, b in zip(start, width, strict=True)]
        if marks:
            axes.plot([marks[name] for name in names], names, "k|", markersize=12, label="whole")
        axes.invert_yaxis()
        axes.set(title=title, xlabel=label)
        axes.grid(axis="x", alpha=0.3)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150, format="png")
