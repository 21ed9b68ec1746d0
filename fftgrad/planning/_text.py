"""Numbers, units and tables, as people read and type them."""

import math
import re
from collections.abc import Sequence

from fftgrad._values import brief, check, check_type, plain

TIME = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(s|ms|us|µs|ns)\s*")
EXPONENTS = {"s": "", "ms": "e-3", "us": "e-6", "µs": "e-6", "ns": "e-9"}
RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?)((?i:bits?)|[bB](?=/s|ps))(?:/s|ps)?\s*")
"""Gb/s is a gigabit per second, GB/s a gigabyte. "1gb" is refused, because it may mean either."""
BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}


def seconds(argument: str, value: str | float) -> float:
    """Read a time in seconds: a number, or a text such as "300ms", "50us", "1.5s"."""
    remedy = "use '300ms'."
    if isinstance(value, str):
        found = TIME.fullmatch(value)
        rule = f"be seconds, or a text with a unit of {', '.join(EXPONENTS)}"
        check(found is not None, argument, rule, brief(value), remedy)
        assert found
        value = float(found[1] + EXPONENTS[found[2]])  # so that 100us is 1e-4 to the last bit
    fine = 0 <= _number(argument, value, remedy) < math.inf
    check(fine, argument, "be finite and not negative", value, remedy)
    return float(value)


def bytes_per_second(argument: str, value: str | float) -> float:
    """Read bytes per second: a number, or a text such as "1gbit", "100 Mbit/s", "25GB/s"."""
    remedy = "use '1gbit' or '125MB/s'."
    if isinstance(value, str):
        found = RATE.fullmatch(value)
        rule = "be bytes per second, or a text in bit/s or B/s"
        check(found is not None, argument, rule, brief(value), remedy)
        assert found
        value = float(found[1]) * BITS[found[2].lower()] * (1.0 if found[3] == "B" else 0.125)
    fine = 0 < _number(argument, value, remedy) < math.inf
    check(fine, argument, "be positive and finite", value, remedy)
    return float(value)


def _number(argument: str, given: object, remedy: str) -> float:
    value = plain(given)
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    check_type(fine, argument, "be a number or a text", given, remedy)
    return value


def quantity(value: float, unit: str) -> str:
    """Format as three digits, prefix and unit: "312 ms", "3,500 s", "4 MB"."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or not math.isfinite(rounded):
        return f"{rounded:g} {unit}"
    largest = 0 if unit == "s" else max(PREFIXES)  # seconds have no prefix above 1
    thousands = min(max(math.floor(math.log10(abs(rounded)) / 3), min(PREFIXES)), largest)
    return f"{three_digits(rounded / 1000.0**thousands)} {PREFIXES[thousands]}{unit}"


def three_digits(value: float) -> str:
    """Format a number without a unit: 1976.3 as "1,980", 0.51234 as "0.512"."""
    return f"{float(f'{value:.3g}'):,.12g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """Format a table. Columns in `text` are aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i in text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return " ".join(padded).rstrip()

    return "\n".join([line(head), "-" * (sum(widths) + len(widths) - 1), *map(line, rows)])
