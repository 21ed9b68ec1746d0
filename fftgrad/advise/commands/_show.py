"""What people read while a command runs and at its end, and what programs read: JSON."""

import contextlib
import json
import math
import pathlib
import textwrap
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}
EVERY = 0.1
"""Seconds between two drawings."""
SELDOM = 10.0
"""Seconds between two lines where there is no terminal, such as in a log."""


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


def paragraph(text: str, console: Console) -> None:
    """Prose, in lines as long as there is room for."""
    lines = textwrap.wrap(
        " ".join(text.split()), console.width, break_on_hyphens=False, break_long_words=False
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def plain(value: Any) -> Any:
    """Convert a record to dicts, lists and numbers; a number that is not finite becomes None."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(k): plain(one) for k, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else repr(value)


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
    what: str, total: float | None = None, aside: float = SELDOM
) -> Generator[Callable[..., None]]:
    """A bar on standard error, if that is a terminal; it is gone at the end.

    What it gives takes how much more is done, and the name of what comes next. It draws only when
    it is called: a thread that draws would disturb what is being timed. Elsewhere it writes a line,
    but none before `aside` seconds have passed since the last, or since it began.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    begun = written = time.monotonic()
    drawn, done = -math.inf, 0.0
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)

        def tell(more: float = 1.0, name: str = "") -> None:
            nonlocal drawn, written, done
            now = time.monotonic()
            if not console.is_terminal and now - written >= aside:
                left = (now - begun) * ((total or 0) - done) / done if done else 0
                about = f", about {quantity(left, 's')} left" if left > 0 else ""
                of = f" {done + more:.0f}/{total:.0f}" if total else ""
                named = f": {name}" if name else ""
                console.print(f"{what}{of}{named}{about}", markup=False)
                written = now
            done += more
            bar.update(task, advance=more, description=f"{what}: {name}" if name else what)
            if name or time.monotonic() - drawn > EVERY:
                bar.refresh()
                drawn = time.monotonic()

        yield tell
