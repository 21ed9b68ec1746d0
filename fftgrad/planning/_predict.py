"""What the model of a step says of one candidate."""

import dataclasses
import math
from typing import NamedTuple

from fftgrad._axes import AxisName
from fftgrad.ops._collectives import Collective
from fftgrad.planning._answer import PlanRow
from fftgrad.planning._candidate import Candidate
from fftgrad.planning._exchange import Timing
from fftgrad.tools._cost import Algorithm, Parts, exchange_seconds, step_seconds
from fftgrad.tools._link import Link

SLOWEST, FASTEST = 1e3, 1e13
"""Bytes per second between which a break-even is searched."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is the same for all rows."""

    step: float
    link: Link
    fast: tuple[int, Link] | None
    buckets: int
    algorithm: Algorithm

    def seconds(self, row: "Known", link: Link | None = None) -> float:
        return step_seconds(self.parts(row, link), every=row.candidate.every, buckets=self.buckets)

    def parts(self, row: "Known", link: Link | None = None) -> Parts:
        slow = link or self.link
        links: Link | dict[str, Link] = {"slow": slow, "fast": self.fast[1]} if self.fast else slow
        exchange = exchange_seconds(row.collectives, links, self.algorithm)
        return Parts(self.step, row.timing.compress, exchange, row.timing.decompress)


class Known(NamedTuple):
    candidate: Candidate
    collectives: tuple[Collective, ...]
    timing: Timing
    error: float | None


def predict(row: Known, dense: list[Known], setting: Setting, axis_name: AxisName) -> PlanRow:
    own, every = row.candidate, row.candidate.every
    seconds, parts = setting.seconds(row), setting.parts(row)
    best = min(map(setting.seconds, dense))
    slow = [c for c in row.collectives if not c.axes or c.axes[0] != "fast"]
    return PlanRow(
        name=own.name,
        code=own.code(axis_name),
        seconds=seconds,
        speed_up=best / seconds,
        wire_bytes=sum(c.bytes for c in slow) / every,
        link_bytes=sum(c.link_bytes(c.workers or 1) for c in slow) / every,
        break_even=None if own.dense else _break_even(row, dense, setting),
        error=row.error,
        loss=own.loss,
        every=every,
        momentum=own.momentum,
        parts=Parts(parts.step, *(part / every for part in parts[1:])),
    )


def _break_even(row: Known, dense: list[Known], setting: Setting) -> float:
    """The bandwidth at which the best dense row takes as long, by bisection of its logarithm."""

    def is_faster(log: float) -> bool:
        link = dataclasses.replace(setting.link, bandwidth=math.exp(log))
        return setting.seconds(row, link) < min(setting.seconds(other, link) for other in dense)

    low, high = math.log(SLOWEST), math.log(FASTEST)
    if is_faster(high):
        return math.inf
    if not is_faster(low):
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return math.exp(low)
