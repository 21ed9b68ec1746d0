"""What the model of a step says of one candidate."""

import dataclasses
import math
from typing import NamedTuple

from fftgrad.advise._answer import PlanRow
from fftgrad.advise._candidate import Candidate
from fftgrad.advise._cost import Algorithm, Parts, exchange_seconds, step_seconds
from fftgrad.advise._exchange import Timing
from fftgrad.advise._inputs import Groups
from fftgrad.advise._link import Link
from fftgrad.ops._collectives import Collective

SLOWEST, FASTEST = 1e3, 1e13
"""Bytes per second between which a break-even is searched."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is the same for all rows."""

    step: float
    link: Link
    groups: Groups
    buckets: int
    algorithm: Algorithm

    def seconds(self, row: "Known", link: Link | None = None) -> float:
        return step_seconds(self.parts(row, link), every=row.candidate.every, buckets=self.buckets)

    def parts(self, row: "Known", link: Link | None = None) -> Parts:
        links = self.groups.links(link or self.link)
        exchange = exchange_seconds(row.collectives, links, self.algorithm)
        return Parts(self.step, row.timing.compress, exchange, row.timing.decompress)


class Known(NamedTuple):
    candidate: Candidate
    collectives: tuple[Collective, ...]
    timing: Timing
    error: float | None


def predict(row: Known, dense: list[Known], setting: Setting) -> PlanRow:
    own, every = row.candidate, row.candidate.every
    seconds, parts = setting.seconds(row), setting.parts(row)
    best = min(map(setting.seconds, dense))
    slow = [c for c in row.collectives if setting.groups.slow in (c.axes or ())]
    return PlanRow(
        name=own.name,
        code=own.code(setting.groups.axis_name),
        seconds=seconds,
        speed_up=best / seconds,
        wire_bytes=sum(c.bytes for c in slow) / every,
        link_bytes=sum(c.link_bytes(c.workers or 1) for c in slow) / every,
        break_even=None if own.dense else _break_even(row, dense, setting),
        error=row.error,
        loss=own.loss,
        steps=own.steps,
        every=every,
        momentum=own.momentum,
        parts=Parts(parts.step, *(part / every for part in parts[1:])),
    )


def _break_even(row: Known, dense: list[Known], setting: Setting) -> float:
    """The bandwidth where the best dense row begins to be faster, looked for from this link on.

    Upwards, if the row is faster here; else downwards. Either end may be without one: an exchange
    of fewer rounds and more bytes wins over fast links alone.
    """

    def is_faster(bandwidth: float) -> bool:
        link = dataclasses.replace(setting.link, bandwidth=bandwidth)
        return setting.seconds(row, link) < min(setting.seconds(other, link) for other in dense)

    at, here = setting.link.bandwidth, is_faster(setting.link.bandwidth)
    factor = 2.0 if here else 0.5
    while is_faster(at * factor) == here:
        at *= factor
        if at > FASTEST if here else at < SLOWEST:
            return math.inf if here else 0.0
    low, high = sorted((at, at * factor))
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return low
