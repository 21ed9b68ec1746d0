"""Figures, drawn without a screen, of text that can be read at 400 pixels."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Bars = Mapping[str, Mapping[str, float]]
"""The parts of each bar, by its name."""

COLORS = ("#1672d3", "#a47f0f", "#239967", "#8c147e", "#a3492d", "#6e7781", "#148fc1")
"""Any two differ for usual eyes and for those that see no red or no green."""


def bars(
    panels: Mapping[str, Bars],
    label: str,
    path: pathlib.Path,
    marks: Mapping[str, float] | None = None,
) -> None:
    """One panel beside the other; the first bar of a panel is at its top.

    A mark on a bar is the whole where it is less than the parts, some of which overlap.
    """
    most = max(map(len, panels.values()))
    figure = Figure(figsize=(1.5 + 4.5 * len(panels), 1.5 + 0.32 * most), layout="constrained")
    row: Sequence[Any] = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, parts) in zip(row, panels.items(), strict=True):
        names, start, colors = list(parts), np.zeros(len(parts)), itertools.cycle(COLORS)
        for part in next(iter(parts.values())):
            width = np.array([parts[name][part] for name in names])
            axes.barh(names, width, left=start, label=part, color=next(colors))
            start += width
        if marks:
            axes.plot([marks[name] for name in names], names, "k|", markersize=12, label="whole")
        axes.invert_yaxis()
        axes.set(title=title, xlabel=label)
        axes.grid(axis="x", alpha=0.3)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150, format="png")
