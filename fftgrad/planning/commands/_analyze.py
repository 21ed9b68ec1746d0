"""`fftgrad analyze`: what gradients look like."""

import argparse
import pathlib

from rich.console import Console
from rich.markup import escape

from fftgrad.planning import Analysis, analyze, load_gradients
from fftgrad.planning._gradients import KEPT, LAGS
from fftgrad.planning.commands._text import (
    add_json,
    count,
    in_file,
    is_read_by_people,
    paragraph,
    png_file,
    progress,
    table,
    write_json,
)

HELP = "what gradients look like, and which codec that speaks for"

EPILOG = """\
gradients of a run, as fg.planning.save_gradients keeps them:
  fftgrad analyze gradients.npz
those of two processes, with a figure and all numbers:
  fftgrad analyze process0.npz process1.npz --png out.png --json all.json
"""

LEAVES = 12
"""The table has so many, those of the most energy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    add = parser.add_argument
    text = "a file of save_gradients, or one of each process; or an .npz of one tree of arrays"
    add("gradients", nargs="+", type=in_file, help=text)
    add_json(parser)
    add("--png", metavar="FILE", type=png_file, help="draw the errors of bases and codecs")
    text = "how many values to look at, over all steps and workers (default: %(default)s)"
    add("--max-values", type=count, default=1 << 22, metavar="N", help=text)


def run(args: argparse.Namespace, console: Console) -> None:
    """Loads, analyzes, shows."""
    gradients = load_gradients(*args.gradients)
    with progress("a minute or two", 3) as tell:
        found = analyze(gradients, max_values=args.max_values, tell=lambda name: tell(name=name))
    write_json(found, args.json, console)
    if args.png:
        draw(found, args.png)
    if is_read_by_people(args):
        show(found, console)


def show(found: Analysis, console: Console) -> None:
    """All tables, and the recommendation."""
    about = (
        f"{found.values:,} values, {found.sampled:,} of them measured, of {len(found.steps)} steps "
        f"and {len(found.workers)} workers; zeros {found.zeros:.1%}, kurtosis {found.kurtosis:.1f} "
        "(3: Gaussian)"
    )
    if found.overlap is not None:
        about += f"; two workers share {found.overlap:.1%} of the places of their largest 1 %"
        about += f", and their gradients have a cosine of {found.cosine:.3f}"
    paragraph(f"{about}.", console)
    bases = table("basis", *(f"{share:.1%} kept" for share in KEPT), padding=1)
    for name, errors in found.dropped.items():
        bases.add_row(name, *(f"{error:.3f}" for error in errors))
    neighbors = table("places apart", *map(str, range(1, LAGS + 1)), padding=1)
    neighbors.add_row("correlation", *(f"{r:.2f}" for r in found.correlation))
    leaves = table("leaf", "values", "energy", "zeros", "1 % kept", padding=1)
    for leaf in sorted(found.leaves, key=lambda leaf: -leaf.energy)[:LEAVES]:
        numbers = f"{leaf.energy:.1%}", f"{leaf.zeros:.0%}", f"{leaf.error:.3f}"
        leaves.add_row(escape(leaf.name), f"{leaf.values:,}", *numbers)
    rates = table("codec", "times fewer", "bits", "error", padding=1)
    for rate in found.rates:
        rates.add_row(repr(rate.codec), f"{rate.ratio:g}", f"{rate.bits:.3g}", f"{rate.error:.3f}")
    for title, one in {
        "Relative error of keeping the largest coefficients, in each basis": bases,
        "Neighbors": neighbors,
        "Leaves, the most energy first": leaves,
        "Codecs: bits a value, and the relative error": rates,
    }.items():
        console.print(title, style="bold")
        console.print(one)
    for sentence in found.recommendation:
        paragraph(f"- {sentence}", console)


def draw(found: Analysis, path: pathlib.Path) -> None:
    """Draw the errors of all bases and of all codecs to a PNG file."""
    from matplotlib.figure import Figure  # only here: the rest works without matplotlib

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bases, codecs = figure.subplots(1, 2)
    for name, errors in found.dropped.items():
        bases.semilogx([100 * share for share in KEPT], errors, ".-", label=name)
    bases.set(xlabel="coefficients kept, %", ylabel="relative error", ylim=(0, 1.02))
    bases.legend(frameon=False)
    for rate in found.rates:
        codecs.semilogx(
            rate.bits, rate.error, "s" if rate.is_dense else "o", label=repr(rate.codec)
        )
    codecs.set(xlabel="bits a value", ylim=(0, 1.1))
    figure.legend(*codecs.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    for axes in (bases, codecs):
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, format="png")
