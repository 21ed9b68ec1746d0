"""Numbers and tables, as people read and type them."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal

COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMGTB]|[KMG]i)?")
FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30
}  # fmt: skip
PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}


def parse_count(argument: str, text: str) -> int:
    """Read a number of values: "250000", "25M", "1.5G", "16Mi"."""
    found = COUNT.fullmatch(text)
    value = Decimal(found[1]) * FACTORS[found[2] or ""] if found else Decimal(0)
    if value < 1 or value != int(value):
        raise ValueError(
            f"{argument}: must be a number of values, got {text!r}; use 250000, 25M or 16Mi."
        )
    return int(value)


def quantity(value: float, unit: str) -> str:
    """Three digits, a prefix and a unit: 0.3123 s is "312 ms", 3.5e3 s "3,500 s", 4e6 B "4 MB"."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or not math.isfinite(rounded):
        return f"{rounded:g} {unit}"
    largest = 0 if unit == "s" else max(PREFIXES)  # nobody writes kiloseconds
    thousands = min(max(math.floor(math.log10(abs(rounded)) / 3), min(PREFIXES)), largest)
    return f"{three_digits(rounded / 1000.0**thousands)} {PREFIXES[thousands]}{unit}"


def three_digits(value: float) -> str:
    """A number without a unit: 1976.3 is "1,980", 0.51234 is "0.512"."""
    return f"{float(f'{value:.3g}'):,.12g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """Lines under a head: columns of `text` on the left of their room, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i in text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return " ".join(padded).rstrip()

    return "\n".join([line(head), "-" * (sum(widths) + len(widths) - 1), *map(line, rows)])
