"""What people read while a command runs and at its end, and what programs read: JSON."""

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Generator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fftgrad.advise._analyze import plain

PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}
EVERY = 0.1
"""Seconds between two drawings."""


def quantity(value: float, unit: str) -> str:
    """Three digits, a prefix and a unit: 0.3123 s is "312 ms", 4e6 B is "4 MB"."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or not math.isfinite(rounded):
        return f"{rounded:g} {unit}"
    thousands = min(max(math.floor(math.log10(abs(rounded)) / 3), min(PREFIXES)), max(PREFIXES))
    return f"{three_digits(rounded / 1000.0**thousands)} {PREFIXES[thousands]}{unit}"


def three_digits(value: float) -> str:
    """A number without a unit: 1976.3 is "1,980", 0.51234 is "0.512"."""
    return f"{float(f'{value:.3g}'):,.12g}"


def bits_per_second(bytes_per_second: float) -> str:
    """The speed of a link, as links are sold."""
    return quantity(8 * bytes_per_second, "bit/s")


def number_of_values(n: int) -> str:
    """A count as it is typed: 16777216 is "16Mi"."""
    for factor, prefix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if n % factor == 0:
            return f"{n // factor}{prefix}"
    return f"{n:,}"


def table(first: str, *numbers: str, title: str = "", padding: int = 0) -> Table:
    """An empty table: a name on the left, its numbers on the right."""
    out = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=padding > 0,
        padding=(0, padding),
    )
    out.add_column(first, overflow="fold")
    for column in numbers:
        out.add_column(column, justify="right", no_wrap=True)
    return out


def write_json(record: Any, path: pathlib.Path | None, console: Console) -> None:
    """Writes a record to a file; to the console for "-", and nowhere for None."""
    if path is None:
        return
    text = json.dumps(plain(record), indent=1, allow_nan=False, ensure_ascii=False)
    if str(path) == "-":
        console.out(text, highlight=False)
    else:
        path.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def progress(
    what: str, total: float | None = None, aside: bool = False
) -> Generator[Callable[..., None]]:
    """A bar on standard error, if that is a terminal; it is gone at the end.

    What it gives takes how much more is done, and the name of what comes next. It draws only when
    it is called: a thread that draws would disturb what is being timed. Elsewhere, `aside`, it
    writes a line for each name.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    drawn, begun, done = -math.inf, time.monotonic(), 0.0
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)

        def tell(more: float = 1.0, name: str = "") -> None:
            nonlocal drawn, done
            if aside and name and not console.is_terminal:
                left = (time.monotonic() - begun) * ((total or 0) - done) / done if done else 0
                about = f", about {quantity(left, 's')} left" if left > 0 else ""
                console.print(f"{what} {done + 1:g}/{total or '?'}: {name}{about}", markup=False)
            done += more
            bar.update(task, advance=more, description=f"{what}: {name}" if name else what)
            if name or time.monotonic() - drawn > EVERY:
                bar.refresh()
                drawn = time.monotonic()

        yield tell
