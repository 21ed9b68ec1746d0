"""Arguments that several commands read, and the text, bars and JSON that they write."""

import argparse
import contextlib
import importlib
import json
import math
import pathlib
import re
import textwrap
import time as clock
from collections.abc import Callable, Generator, Mapping
from decimal import Decimal
from typing import Any, cast

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fftgrad._values import brief, scheme_of
from fftgrad.planning import _link

COUNT = re.compile(r"([0-9]++(?:\.[0-9]++)?)([kKMGTB]|[KMG]i)?")
FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30
}  # fmt: skip
MOST_VALUES, MOST, MOST_SECONDS, DAY = 10**15, 10**6, 10**6, 86_400
"""Bounds, so that an answer is finite and comes."""
RATES = 0.125, 1e15
"""The least and the most bytes per second of a link."""


def refusal(rule: str, text: str, remedy: str) -> argparse.ArgumentTypeError:
    """The error about a text; argparse puts the argument before it."""
    return argparse.ArgumentTypeError(f"{rule}, got {brief(text)}; {remedy}")


def count(text: str) -> int:
    """Read a number of values: "250000", "25M", "1.5G", "16Mi"."""
    found = COUNT.fullmatch(text)
    value = Decimal(found[1]) * FACTORS[found[2] or ""] if found else Decimal(0)
    if not 1 <= value <= MOST_VALUES or value != int(value):
        raise refusal("must be a number of values, 1 to 1000T", text, "use 250000, 25M or 16Mi.")
    return int(value)


def counts(text: str) -> tuple[int, ...]:
    """Read several numbers of values, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """A reader of whole numbers within bounds."""

    def read(text: str) -> int:
        digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if not digits or not least <= int(text) <= most:
            raise refusal(f"must be a whole number, {least} to {most}", text, f"use {least}.")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Read a positive number of seconds to spend."""
    if not _is_number(text) or not 0 < float(text) <= DAY:
        raise refusal(f"must be seconds, above 0 and at most {DAY}", text, "use 5.")
    return float(text)


def time(text: str) -> float:
    """Read seconds with a unit, because 300 may mean milliseconds."""
    remedy = "use 300ms or 0.3s."
    found = _with_unit(_link.seconds, text, remedy)
    if found > MOST_SECONDS:
        raise refusal(f"must be at most {MOST_SECONDS} s", text, remedy)
    return found


def rate(text: str) -> float:
    """Read bytes per second with a unit."""
    remedy = "use 1Gbit/s or 125MB/s."
    found = _with_unit(_link.bytes_per_second, text, remedy)
    if not RATES[0] <= found <= RATES[1]:
        raise refusal("must be 1 bit/s to 1000 TB/s", text, remedy)
    return found


def _with_unit(read: Callable[[str, str], float], text: str, remedy: str) -> float:
    if _is_number(text):
        raise refusal("must have a unit", text, remedy)
    try:
        return read("", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def names(text: str) -> str | tuple[str, ...]:
    """Read the name of an axis, or several with commas between them."""
    several = tuple(text.split(","))
    if "" in several or len({*several}) < len(several):
        raise refusal("must be a name, or names that differ", text, "use data, or slow,fast.")
    return several if len(several) > 1 else text


def in_file(text: str) -> pathlib.Path:
    """A file to read."""
    return _path(text, pathlib.Path.is_file, "must be a file that exists", "look for its name.")


def out_file(text: str) -> pathlib.Path:
    """A file to write."""
    rule, remedy = "must be a file in a folder that exists", "make the folder first."
    return _path(text, lambda path: not path.is_dir() and path.parent.is_dir(), rule, remedy)


def png_file(text: str) -> pathlib.Path:
    """A figure to write, by a package that may be missing."""
    importlib.import_module("matplotlib")
    path = out_file(text)
    if path.suffix.lower() != ".png":
        raise refusal("must be a file that ends in .png", text, "use plan.png.")
    return path


def store(text: str) -> str:
    """The URL of a store, or its folder with ~ expanded."""
    if scheme_of(text):
        return text
    remedy = "use s3://bucket/run."
    return str(_path(text, lambda _: text != "", "must be a folder or a URL", remedy))


def _path(text: str, fits: Callable[[pathlib.Path], bool], rule: str, remedy: str) -> pathlib.Path:
    """A path that fits, with ~ expanded, which a shell leaves as it is in --json=~/plan.json."""
    try:
        path = pathlib.Path(text).expanduser()
        if "\0" not in text and fits(path):
            return path
    except (OSError, RuntimeError, ValueError):  # too long, ~ of nobody, no text of the system
        pass
    raise refusal(rule, text, remedy)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--json`."""
    text = "write all numbers as JSON; - for standard output, and nothing else there"
    parser.add_argument("--json", type=out_file, metavar="FILE", help=text)


def is_read_by_people(args: argparse.Namespace) -> bool:
    """True if standard output is for people."""
    return str(args.json) != "-"


PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}


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
    """Print prose, in lines as long as there is room for."""
    lines = textwrap.wrap(  # rich would leave a space at the end of a line
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
    """Write a record to a file; to the console for "-", and nowhere for None."""
    if path is None:
        return
    text = json.dumps(plain(record), indent=1, allow_nan=False, ensure_ascii=False)
    if str(path) == "-":
        console.out(text, highlight=False)
    else:
        path.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def progress(what: str, total: float | None = None) -> Generator[Callable[..., None]]:
    """Show a bar on standard error while that is a terminal.

    It yields a function of how much more is done and of the name of what comes next. It draws only
    when it is called: a thread that draws would disturb what is timed.
    """
    console, drawn = Console(stderr=True), 0.0
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)

        def tell(more: float = 1.0, name: str = "") -> None:
            nonlocal drawn
            bar.update(task, advance=more, description=f"{what}: {name}" if name else what)
            if name or clock.monotonic() - drawn > 0.1:
                bar.refresh()
                drawn = clock.monotonic()

        yield tell
