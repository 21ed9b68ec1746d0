"""Figures, drawn without a screen, of text that can be read at 400 pixels."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

import fftgrad as fg
from fftgrad.advise import Analysis, Rate
from fftgrad.advise._bases import KEPT
from fftgrad.advise._sample import BLOCK
from fftgrad.codecs import _chain

Bars = Mapping[str, Mapping[str, float]]
"""The parts of each bar, by its name."""

INK = "#1f2328"
COLORS = ("#1672d3", "#a47f0f", "#239967", "#8c147e", "#a3492d", "#6e7781", "#148fc1")
"""Any two differ for usual eyes and for those that see no red or no green."""
CURVES = 5


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


def analysis(found: Analysis, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes compaction.png, spectrum.png and rate_distortion.png, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    fill = {"compaction": _compaction, "spectrum": _spectrum, "rate_distortion": _rates}
    for name in fill:
        figure = Figure(figsize=(6, 4.5), layout="constrained")
        axes = figure.subplots()
        fill[name](found, axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(folder / f"{name}.png", dpi=200)
    return [folder / f"{name}.png" for name in fill]


def _compaction(found: Analysis, axes: Any) -> None:
    """No basis, and those in which the largest 1 % hold most."""
    dropped = found.whole.dropped
    others = sorted((n for n in dropped if n != "none"), key=lambda n: float(dropped[n][1]))
    colors = (INK, *COLORS)
    for name, color in zip(("none", *others[: CURVES - 1]), colors, strict=False):
        axes.plot(KEPT, dropped[name], ".-", label=name, color=color)
    axes.set(xscale="log", xlabel="share of reals kept", ylabel="relative error", ylim=(0, 1.02))
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")


def _spectrum(found: Analysis, axes: Any) -> None:
    """Of the whole, and of the leaves of the most energy; less than a block has no spectrum."""
    leaves = (leaf for leaf in found.most_energy(len(found.leaves)) if leaf.sampled >= BLOCK)
    shown = (found.whole, *itertools.islice(leaves, CURVES - 1))
    for figures, color in zip(shown, (INK, *COLORS), strict=False):
        if figures.spectrum is not None:
            bands = np.arange(1, figures.spectrum.size + 1)
            flat = figures.spectrum * figures.spectrum.size
            width = 2.5 if figures is found.whole else 1.2
            name = figures.name if len(figures.name) <= 30 else f"…{figures.name[-29:]}"
            axes.plot(bands, flat, ".-", label=name, linewidth=width, color=color)
    axes.set(yscale="log", xlabel="band, low to high frequencies", ylabel="energy / flat spectrum")
    _plain_ticks(axes.yaxis)


MARKS = "os^Dv<>"


def _rates(found: Analysis, axes: Any) -> None:
    """A color and a mark for each kind of codec; those of a few bits for each value are hollow."""
    looks = zip(itertools.cycle(COLORS), itertools.cycle(MARKS), strict=False)
    for name, own in itertools.groupby(sorted(found.rates, key=_kind), key=_kind):
        rates, (color, mark) = list(own), next(looks)
        spots = [r.bits for r in rates], [r.error for r in rates]
        filled = "none" if rates[0].is_dense else color
        axes.plot(*spots, mark, label=name, color=color, markerfacecolor=filled)
    ideal = sorted((r.error, r.bound) for r in found.rates if r.basis == fg.Identity())
    errors, bits = np.reshape(ideal, (-1, 2)).T
    axes.plot(bits, errors, "--", color=INK, label="ideal coder of the values")
    axes.set(xscale="log", xlabel="bits a value", ylabel="relative error", ylim=(0, 1.1))
    _plain_ticks(axes.xaxis)


def _plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10 and so on, without powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _kind(rate: Rate) -> str:
    """The parts of a codec, a transform with its block, such as "Dct 64, TopK, LogLevels"."""
    names: list[str] = []
    for stage in _chain.stages(rate.codec):
        block = getattr(stage, "block", None) if isinstance(stage, fg.Transform) else None
        names.append(type(stage).__name__ + (f" {block}" if block else ""))
    return ", ".join(names)
