"""Figures, drawn without a screen."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import fftgrad as fg
from fftgrad.advise import Analysis
from fftgrad.advise._bases import KEPT

Bars = Mapping[str, Mapping[str, float]]
"""The parts of each bar, by its name."""


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
        names, start = list(parts), np.zeros(len(parts))
        for part in next(iter(parts.values())):
            width = np.array([parts[name][part] for name in names])
            axes.barh(names, width, left=start, label=part)
            start += width
        if marks:
            axes.plot([marks[name] for name in names], names, "k|", markersize=12, label="whole")
        axes.invert_yaxis()
        axes.set(title=title, xlabel=label)
        axes.grid(axis="x", alpha=0.3)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150, format="png")


def analysis(found: Analysis, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes compaction.png, spectrum.png and rate_distortion.png, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    fill = {"compaction": _compaction, "spectrum": _spectrum, "rate_distortion": _rates}
    for name in fill:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        fill[name](found, axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=110)
    return [folder / f"{name}.png" for name in fill]


def _compaction(found: Analysis, axes: Any) -> None:
    for name, errors in found.whole.dropped.items():
        axes.plot(KEPT, errors, ".-", label=name, color="black" if name == "none" else None)
    axes.set(xscale="log", xlabel="share of reals kept", ylabel="relative error", ylim=(0, 1.02))


def _spectrum(found: Analysis, axes: Any) -> None:
    for figures in (found.whole, *found.most_energy(5)):
        if figures.spectrum is not None:
            bands = np.arange(1, figures.spectrum.size + 1)
            flat = figures.spectrum * figures.spectrum.size
            width = 2 if figures is found.whole else 1
            axes.plot(bands, flat, ".-", label=figures.name, linewidth=width)
    axes.set(yscale="log", xlabel="band, low to high frequencies", ylabel="energy / flat spectrum")


def _rates(found: Analysis, axes: Any) -> None:
    for label, is_dense, mark in (("sparse", False, "o"), ("a few bits a value", True, "s")):
        own = [(rate.bits, rate.error) for rate in found.rates if rate.is_dense == is_dense]
        axes.plot(*np.reshape(own, (-1, 2)).T, mark, label=label)
    ideal = sorted((r.error, r.bound) for r in found.rates if r.basis == fg.Identity())
    errors, bits = np.reshape(ideal, (-1, 2)).T
    axes.plot(bits, errors, "k--", label="ideal coder of the values")
    axes.set(xscale="log", xlabel="bits a value", ylabel="relative error", ylim=(0, 1.1))
