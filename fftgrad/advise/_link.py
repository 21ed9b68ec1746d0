"""A link between workers."""

import dataclasses

from fftgrad._values import constructor_call
from fftgrad.advise import _units
from fftgrad.ops._collectives import RING


@dataclasses.dataclass(frozen=True, repr=False)
class Link:
    """Value: what a message takes between two workers: latency + bytes / bandwidth.

    `fg.advise.measure` finds both for a mesh. Where they are given, the bandwidth is what a
    collective
    gets: of the line rate of an Ethernet TCP leaves 94 to 96 %.

    Args:
      bandwidth: bytes per second in each direction, or a text: "1gbit", "100 Mbit/s", "25GB/s".
      latency: seconds that a round of a collective takes however short its messages are, or a text:
        "100us", "2ms". gloo takes two to three times the delay of the link.
      shares: what a kind of collective gets of the bandwidth, such as (("all-to-all", 0.6),), where
        that is not all of it.
      residual: the relative error, in the root mean square, with which the two explain what was
        measured; 0 where nothing was.

    Raises:
      ValueError: if the bandwidth is not positive, the latency negative, a text has no unit, or a
        share is none of a kind of collective.
      TypeError: if either is no number and no text.

    Example:
      >>> import fftgrad as fg
      >>> fg.advise.Link("1gbit", "100us")
      Link(bandwidth=125000000.0, latency=0.0001)
    """

    bandwidth: float
    latency: float
    shares: tuple[tuple[str, float], ...] = ()
    residual: float = dataclasses.field(default=0.0, compare=False)

    __repr__ = constructor_call

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "50us",
        shares: tuple[tuple[str, float], ...] = (),
        residual: float = 0.0,
    ) -> None:
        set_field = object.__setattr__
        rate = _units.bytes_per_second("Link(bandwidth)", bandwidth)
        set_field(self, "bandwidth", rate)
        set_field(self, "latency", _units.seconds("Link(latency)", latency))
        for kind, share in shares:
            if kind not in RING or not 0 < share <= 1:
                raise ValueError(
                    "Link(shares): must be kinds of collectives, each with its share, above 0 and "
                    f"at most 1, got {(kind, share)}; use (('all-to-all', 0.6),)."
                )
        set_field(self, "shares", shares)
        set_field(self, "residual", residual)
