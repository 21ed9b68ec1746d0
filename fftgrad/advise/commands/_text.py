"""Numbers for people: three digits and a prefix."""

import math
from collections.abc import Mapping

from rich import box
from rich.table import Table

PREFIXES: Mapping[int, str] = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}


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


def table(first: str, *numbers: str, title: str = "") -> Table:
    """An empty table: a name on the left, what is said of it on the right."""
    out = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0),
    )
    out.add_column(first, overflow="fold")
    for column in numbers:
        out.add_column(column, justify="right", no_wrap=True)
    return out
