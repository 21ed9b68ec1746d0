"""Tables and figures of what gradients look like."""

import argparse
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from fftgrad.advise import Analysis, Figures, analyze
from fftgrad.advise._bases import BASES, KEPT
from fftgrad.advise.commands import _analyze_figures, _files, _json
from fftgrad.advise.commands._arguments import in_file, out_file, out_folder, tells

HELP = "what gradients look like, and which codec that speaks for"

EPILOG = """\
gradients of a run, as record_gradients and save_gradients of fg.advise keep
them:
  fftgrad analyze gradients.npz
those of two processes, with figures and all numbers:
  fftgrad analyze process0.npz process1.npz --figures out --json all.json
"""

LEAVES = 12
"""The table has so many, those of the most energy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    add = parser.add_argument
    add(
        "gradients",
        nargs="+",
        type=in_file,
        help="a file of save_gradients, or one of each process; or .npz, .npy or .safetensors "
        "with one tree of arrays",
    )
    add(
        "--json",
        type=out_file,
        metavar="FILE",
        help="write all numbers as JSON; - for standard output, and nothing else there",
    )
    add("--figures", metavar="FOLDER", type=out_folder, help="write three PNG files there")
    add(
        "--max-values",
        type=int,
        default=1 << 22,
        help="how many values to look at, over all steps and workers (default: %(default)s)",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Loads, analyzes, shows; the exit code."""
    pyplot = _analyze_figures.plotter() if args.figures else None
    gradients = _files.gradients("analyze(gradients)", *args.gradients)
    # On standard error, so that what is written to standard output can be read by a program.
    with Console(stderr=True).status("measuring codecs takes a minute or two"):
        found = analyze(gradients, max_values=args.max_values)
    paths = _analyze_figures.draw(found, args.figures, pyplot) if args.figures else []
    _json.write(found.as_dict(), args.json, console)
    if tells(args):
        for path in paths:
            console.print(f"written: {path}", highlight=False)
        show(found, console)
    return 0


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
    for title, table in tables.items():
        if table.row_count:
            console.print(title, style="bold")
            console.print(table)
    console.print("Recommendation", style="bold")
    for sentence in found.recommendation:
        console.print(f"- {sentence}", markup=False, highlight=False)


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


def _table(*columns: str) -> Table:
    """The first column of words, the others of numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _compaction(found: Analysis) -> Table:
    kept = [f"{share:.1%} kept" for share in KEPT]
    table = _table("basis", *kept)
    for basis in BASES:
        table.add_row(basis.name, *(f"{e:.3f}" for e in found.whole.dropped[basis.name]))
    return table


def _neighbors(found: Analysis) -> Table:
    table = _table("", *(str(n) for n in range(1, 9)))
    whole = found.whole
    if whole.correlation is not None and whole.spectrum is not None:
        flat = whole.spectrum * whole.spectrum.size
        table.add_row("lag", *(f"{r:.2f}" for r in whole.correlation))
        table.add_row("low bands", *(f"{s:.2f}" for s in flat[:8]))
        table.add_row("high bands", *(f"{s:.2f}" for s in flat[8:]))
    return table


def _leaves(found: Analysis) -> Table:
    most = sorted(found.leaves, key=lambda leaf: -leaf.energy)[:LEAVES]
    table = _table("leaf", "values", "energy", "zeros", "kurt.", "lag 1", "none", "best", "error")
    for leaf in most if len(found.leaves) > 1 else []:
        table.add_row(*_leaf(leaf))
    return table


def _leaf(leaf: Figures) -> Sequence[str]:
    lag = None if leaf.correlation is None else float(leaf.correlation[0])
    return (
        leaf.name if len(leaf.name) <= 22 else f"…{leaf.name[-21:]}",
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
    table = _table("", "places", "cosine", "signal/noise")
    whole = found.whole
    if whole.overlap is not None:
        figures = (whole.cosine, ".3f"), (whole.signal, ".3g")
        shown = (_number(*figure) for figure in figures)
        table.add_row("two workers, one step", f"{whole.overlap:.1%}", *shown)
    for pair in found.between_steps:
        name = f"one worker, steps {pair.steps[0]} and {pair.steps[1]}"
        table.add_row(name, f"{pair.overlap:.1%}", f"{pair.cosine:.3f}", "")
    return table


def _rates(found: Analysis) -> Table:
    table = _table("codec", "bits", "error", "ideal")
    ratio = None
    for rate in found.rates:
        if ratio not in (None, rate.ratio):
            table.add_section()
        ratio = rate.ratio
        figures = f"{rate.bits:.3g}", f"{rate.error:.3f}", f"{rate.bound:.3g}"
        table.add_row(repr(rate.codec), *figures)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
