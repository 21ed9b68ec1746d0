"""`fftgrad analyze`: what gradients look like."""

import argparse
from collections.abc import Sequence
from typing import get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fftgrad.advise import Analysis, Figures, analyze, load_gradients
from fftgrad.advise._analyze import RATIOS
from fftgrad.advise._bases import BASES, KEPT
from fftgrad.advise._gradient_files import Each
from fftgrad.advise.commands._arguments import (
    add_json,
    count,
    in_file,
    is_read_by_people,
    png_folder,
)
from fftgrad.advise.commands._show import paragraph, progress, table, write_json

HELP = "what gradients look like, and which codec that speaks for"

EPILOG = """\
gradients of a run, as fg.advise.save_gradients keeps them:
  fftgrad analyze gradients.npz
those of two processes, with figures and all numbers:
  fftgrad analyze process0.npz process1.npz --figures out --json all.json
arrays that say nothing of their worker, a file of each:
  fftgrad analyze worker0.npz worker1.npz --each worker
"""

LEAF = "leaf", "values", "energy", "zeros", "kurt.", "lag 1", "none", "best", "error"
LEAVES = 12
"""The table has so many, those of the most energy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    add = parser.add_argument
    text = """a file of save_gradients, or one of each process; or .npz, .npy or .safetensors with
        one tree of arrays"""
    add("gradients", nargs="+", type=in_file, help=text)
    text = "what a file is that does not say its step and worker, if there are several"
    add("--each", choices=get_args(Each), help=text)
    add_json(parser)
    add("--figures", metavar="FOLDER", type=png_folder, help="write three PNG files there")
    text = "how many values to look at, over all steps and workers (default: %(default)s)"
    add("--max-values", type=count, default=1 << 22, metavar="N", help=text)


def run(args: argparse.Namespace, console: Console) -> None:
    """Loads, analyzes, shows."""
    gradients = load_gradients(*args.gradients, each=args.each)
    with progress("a minute or two", len(RATIOS), aside=0.0) as tell:
        found = analyze(gradients, max_values=args.max_values, tell=lambda name: tell(name=name))
    write_json(found.as_dict(), args.json, console)
    if args.figures:
        from fftgrad.advise.commands import _draw  # only here: the rest works without matplotlib

        for path in _draw.analysis(found, args.figures):
            if is_read_by_people(args):
                console.print(f"written: {path}", markup=False, highlight=False)
    if is_read_by_people(args):
        show(found, console)


def show(found: Analysis, console: Console) -> None:
    """All tables, and the recommendation."""
    console.print(_about(found), highlight=False)
    tables = {
        "Relative error of keeping the largest coefficients, in each basis": _compaction(found),
        "Neighbors: correlation 1 to 8 apart, 16 bands over a flat spectrum": _neighbors(found),
        "Leaves, the most energy first; error of 1 % kept, without and in a basis": _leaves(found),
        "In common: places of the largest 1 % (1 % by chance), and the cosine": _common(found),
        "Codecs: bits a value, and those of an ideal coder at the same error": _rates(found),
    }
    for title, one in tables.items():
        if one.row_count:
            console.print(title, style="bold")
            console.print(one)
    console.print("Recommendation", style="bold")
    for sentence in found.recommendation:
        paragraph(f"- {sentence}", console)


def _about(found: Analysis) -> str:
    whole = found.whole
    seen = "all of them looked at"
    if found.sampled < found.values:
        seen = f"{found.sampled:,} looked at, in blocks of 4,096 drawn with seed {found.seed}"
    unseen = f"\nno block was drawn of {len(found.unseen)} leaves" if found.unseen else ""
    return (
        f"{found.values:,} values, {seen}{unseen}\n"
        f"steps {_list(found.steps)}; workers {_list(found.workers)}\n"
        f"zeros {whole.zeros:.1%}, kurtosis {_number(whole.kurtosis, '.1f')} (3: Gaussian)"
    )


def _compaction(found: Analysis) -> Table:
    kept = [f"{share:.1%} kept" for share in KEPT]
    out = table("basis", *kept, padding=1)
    for basis in BASES:
        out.add_row(basis.name, *(f"{e:.3f}" for e in found.whole.dropped[basis.name]))
    return out


def _neighbors(found: Analysis) -> Table:
    out = table("", *map(str, range(1, 9)), padding=1)
    whole = found.whole
    if whole.correlation is not None and whole.spectrum is not None:
        flat = whole.spectrum * whole.spectrum.size
        out.add_row("lag", *(f"{r:.2f}" for r in whole.correlation))
        out.add_row("low bands", *(f"{s:.2f}" for s in flat[:8]))
        out.add_row("high bands", *(f"{s:.2f}" for s in flat[8:]))
    return out


def _leaves(found: Analysis) -> Table:
    out = table(*LEAF, padding=1)
    for leaf in found.most_energy(LEAVES):
        out.add_row(*_leaf(leaf))
    return out


def _leaf(leaf: Figures) -> Sequence[str]:
    lag = None if leaf.correlation is None else float(leaf.correlation[0])
    return (
        escape(leaf.name if len(leaf.name) <= 22 else f"…{leaf.name[-21:]}"),
        f"{leaf.values:,}",
        f"{leaf.energy:.1%}",
        f"{leaf.zeros:.0%}",
        _number(leaf.kurtosis, ".3g"),
        _number(lag, ".2f"),
        f"{leaf.dropped['none'][1]:.2f}",
        leaf.best,
        f"{leaf.dropped[leaf.best][1]:.2f}",
    )


def _common(found: Analysis) -> Table:
    out = table("", "places", "cosine", "signal/noise", padding=1)
    whole = found.whole
    if whole.overlap is not None:
        figures = (whole.cosine, ".3f"), (whole.signal, ".3g")
        shown = (_number(*figure) for figure in figures)
        out.add_row("two workers, one step", f"{whole.overlap:.1%}", *shown)
    for pair in found.between_steps:
        name = f"one worker, steps {pair.steps[0]} and {pair.steps[1]}"
        out.add_row(name, f"{pair.overlap:.1%}", f"{pair.cosine:.3f}", "")
    return out


def _rates(found: Analysis) -> Table:
    out = table("codec", "bits", "error", "ideal", padding=1)
    ratio = None
    for rate in found.rates:
        if ratio not in (None, rate.ratio):
            out.add_section()
        ratio = rate.ratio
        figures = f"{rate.bits:.3g}", f"{rate.error:.3f}", f"{rate.bound:.3g}"
        out.add_row(repr(rate.codec), *figures)
    return out


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
