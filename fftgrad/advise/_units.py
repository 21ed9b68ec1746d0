"""Rates and times as people write them."""

import re
from decimal import Decimal

SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9", "min": "60"}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
NUMBER = re.compile(r"\s*(-?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", re.IGNORECASE)


def seconds(argument: str, value: str | float) -> float:
    """A time in seconds: a number, or a text such as "300ms", "50us", "1.5s"."""
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        if not match or match[2] not in SECONDS:
            raise ValueError(
                f"{argument}: must be seconds, or a text with a unit of {', '.join(SECONDS)}, got "
                f"{value!r}; use '300ms'."
            )
        # In decimals, so that 100us is 1e-4.
        value = float(Decimal(match[1]) * Decimal(SECONDS[match[2]]))
    return _checked(argument, value, "use '300ms'.")


def bytes_per_second(argument: str, value: str | float) -> float:
    """A rate in bytes per second: a number, or a text such as "1gbit", "100 Mbit/s", "25GB/s"."""
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        unit = match and re.fullmatch(r"([kmgt]?)(bit|b|B)(?:/s|ps)?", match[2], re.IGNORECASE)
        if not match or not unit:
            raise ValueError(
                f"{argument}: must be bytes per second, or a text in bit/s or B/s, got {value!r}; "
                "use '1gbit' or '125MB/s'."
            )
        # As the field writes it: Gb is a gigabit, GB a gigabyte.
        eighth = 1.0 if unit[2] == "B" else 0.125
        value = float(match[1]) * PREFIXES[unit[1].lower()] * eighth
    return _checked(argument, value, "use '1gbit' or '125MB/s'.", positive=True)


def _checked(argument: str, value: object, remedy: str, *, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{argument}: must be a number or a text, got {type(value).__name__}; {remedy}"
        )
    if not (value > 0 if positive else value >= 0) or value == float("inf"):
        rule = "positive and finite" if positive else "finite and not negative"
        raise ValueError(f"{argument}: must be {rule}, got {value}; {remedy}")
    return float(value)
