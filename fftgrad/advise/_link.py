"""A link between workers, and rates and times as people write them."""

import dataclasses
import re
from decimal import Decimal, DecimalException

from fftgrad._values import brief, plain, value
from fftgrad.ops._collectives import RING

SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9", "min": "60"}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
NUMBER = re.compile(
    r"\s*+(-?(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:e[+-]?[0-9]++)?+)\s*+(\S*+)\s*+", re.IGNORECASE
)
BITS = re.compile(r"(?P<prefix>[kmgt]?)(?P<unit>bit)s?(?:/s|ps)?", re.IGNORECASE)
LETTER = re.compile(r"(?P<prefix>[kKMGT]?)(?P<unit>[bB])(?:/s|ps)")
"""As the field writes it: Gb/s is a gigabit a second, GB/s a gigabyte."""
BPS = re.compile(r"(?P<prefix>[kmgt])(?P<unit>b)ps")
"""All in small letters it is bits too: mbps is how links are sold."""
EITHER = re.compile(r"[kmgt]?b(?:/s|ps)?", re.IGNORECASE)
"""Whose case tells nothing: who writes 1gb may mean either, and one is eight times the other."""


@value
class Link:
    """Value: what a message takes between two workers: latency + bytes / bandwidth.

    `fg.advise.measure` finds both for a mesh. Where they are given, the bandwidth is what a
    collective gets: of the line rate of an Ethernet TCP leaves 94 to 96 %, of packets of 9,001
    bytes 99 %, and many connections over a short queue, or a link of 40 Gbit/s and more, leave much
    less (docs/results/others.md).

    Args:
      bandwidth: bytes per second in each direction, or a text: "1gbit", "100 Mbit/s", "25GB/s".
      latency: seconds that a round of a collective takes however short its messages are, or a text:
        "100us", "2ms". gloo takes two to three times the delay of the link.
      shares: what a kind of collective gets of the bandwidth, such as (("all-to-all", 0.6),), where
        that is not all of it.
      residual: the relative error, in the root mean square, with which the two explain what was
        measured; 0 where nothing was.

    Example:
      >>> fg.advise.Link("1gbit", "100us")
      Link(bandwidth=125000000.0, latency=0.0001)
    """

    bandwidth: float
    latency: float
    shares: tuple[tuple[str, float], ...] = ()
    residual: float = dataclasses.field(default=0.0, compare=False)

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "50us",
        shares: tuple[tuple[str, float], ...] = (),
        residual: float = 0.0,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "bandwidth", bytes_per_second("Link(bandwidth)", bandwidth))
        set_field(self, "latency", seconds("Link(latency)", latency))
        for kind, share in shares:
            if kind not in RING or not 0 < share <= 1:
                raise ValueError(
                    "Link(shares): must be kinds of collectives, each with its share, above 0 and "
                    f"at most 1, got {(kind, share)}; use (('all-to-all', 0.6),)."
                )
        set_field(self, "shares", plain(shares, "float"))
        set_field(self, "residual", plain(residual, "float"))

    @classmethod
    def of(cls, link: "Link | str | float") -> "Link":
        """A link, or that of a bandwidth alone."""
        return link if isinstance(link, Link) else cls(link)


def seconds(argument: str, value: str | float) -> float:
    """A time in seconds: a number, or a text such as "300ms", "50us", "1.5s"."""
    remedy = "use '300ms'."
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        unit = match[2].replace("\u03bc", "µ") if match else ""  # Greek mu for the sign of micro
        if not match or unit not in SECONDS:
            raise ValueError(
                f"{argument}: must be seconds, or a text with a unit of {', '.join(SECONDS)}, got "
                f"{brief(value)}; {remedy}"
            )
        try:  # in decimals, so that 100us is 1e-4
            value = float(Decimal(match[1]) * Decimal(SECONDS[unit]))
        except DecimalException:  # beyond what they hold
            value = float(match[1])
    if not 0 <= _number(argument, value, remedy) < float("inf"):
        raise ValueError(f"{argument}: must be finite and not negative, got {value}; {remedy}")
    return float(value)


def bytes_per_second(argument: str, value: str | float) -> float:
    """A rate in bytes per second: a number, or a text such as "1gbit", "100 Mbit/s", "25GB/s"."""
    remedy = "use '1gbit' or '125MB/s'."
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        written = match[2] if match else ""
        unit = BITS.fullmatch(written) or LETTER.fullmatch(written) or BPS.fullmatch(written)
        if not match or not unit:
            unclear = ", which may be bits or bytes" if EITHER.fullmatch(written) else ""
            raise ValueError(
                f"{argument}: must be bytes per second, or a text in bit/s or B/s, got "
                f"{brief(value)}{unclear}; {remedy}"
            )
        factor = 1.0 if unit["unit"] == "B" else 0.125
        value = float(match[1]) * PREFIXES[unit["prefix"].lower()] * factor
    if not 0 < _number(argument, value, remedy) < float("inf"):
        raise ValueError(f"{argument}: must be positive and finite, got {value}; {remedy}")
    return float(value)


def _number(argument: str, given: object, remedy: str) -> float:
    value = plain(given)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{argument}: must be a number or a text, got {type(value).__name__}; {remedy}"
        )
    return value
