"""Three figures of an analysis."""

import pathlib
from typing import Any

import numpy as np

from fftgrad.advise import Analysis
from fftgrad.advise._bases import KEPT
from fftgrad.codecs.transforms import Identity


def plotter() -> Any:
    """What draws, without a screen; asked for before a long run, because it may be missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(found: Analysis, folder: pathlib.Path, pyplot: Any) -> list[pathlib.Path]:
    """Writes compaction.png, spectrum.png and rate_distortion.png, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[pathlib.Path] = []
    for name, fill in {
        "compaction": _compaction,
        "spectrum": _spectrum,
        "rate_distortion": _rates,
    }.items():
        figure, axis = pyplot.subplots(figsize=(7, 4.5))
        fill(found, axis)
        axis.grid(alpha=0.3)
        figure.tight_layout()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def _compaction(found: Analysis, axis: Any) -> None:
    for name, errors in found.whole.dropped.items():
        axis.plot(KEPT, errors, ".-", label=name, color="black" if name == "none" else None)
    axis.set(xscale="log", xlabel="share of reals kept", ylabel="relative error", ylim=(0, 1.02))
    axis.legend(fontsize=8)


def _spectrum(found: Analysis, axis: Any) -> None:
    most = sorted(found.leaves, key=lambda leaf: -leaf.energy)[:5]
    for figures in (found.whole, *(leaf for leaf in most if len(found.leaves) > 1)):
        if figures.spectrum is not None:
            bands = np.arange(1, figures.spectrum.size + 1)
            width = 2 if figures is found.whole else 1
            flat = figures.spectrum * figures.spectrum.size
            axis.plot(bands, flat, ".-", label=figures.name, linewidth=width)
    axis.set(yscale="log", xlabel="band, low to high frequencies", ylabel="energy / flat spectrum")
    axis.legend(fontsize=8)


def _rates(found: Analysis, axis: Any) -> None:
    dense = [rate for rate in found.rates if rate.is_dense]
    sparse = [rate for rate in found.rates if not rate.is_dense]
    for label, rates, mark in (("sparse", sparse, "o"), ("a few bits a value", dense, "s")):
        axis.plot([r.bits for r in rates], [r.error for r in rates], mark, label=label)
    ideal = sorted((r.error, r.bound) for r in found.rates if r.basis == Identity())
    axis.plot(
        [b for _, b in ideal],
        [e for e, _ in ideal],
        "k--",
        label="ideal coder of the values",
    )
    axis.set(xscale="log", xlabel="bits a value", ylabel="relative error", ylim=(0, 1.1))
    axis.legend(fontsize=8)
