"""What the model of a step says of candidates: by how long each takes here, and what it sends."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from fftgrad.advise._answer import PlanRow
from fftgrad.advise._candidate import Candidate
from fftgrad.advise._cost import Algorithm, Parts, exchange_seconds, step_seconds
from fftgrad.advise._inputs import Groups
from fftgrad.advise._link import Link
from fftgrad.advise._measure import Measured
from fftgrad.ops._collectives import Collective

SLOWEST, FASTEST = 1e3, 1e13
"""Bytes per second between which a break-even is searched."""


class Model(NamedTuple):
    """What is the same for all rows; the timings and the collectives are by their names."""

    measured: Measured
    groups: Groups
    buckets: int
    algorithm: Algorithm
    sent: Mapping[str, tuple[Collective, ...]]

    def parts(self, row: Candidate, link: Link) -> Parts:
        """The parts of a step that exchanges."""
        exchange = exchange_seconds(self.sent[row.name], self.groups.links(link), self.algorithm)
        timing = self.measured.timings[row.name]
        return Parts(self.measured.step, timing.compress, exchange, timing.decompress)

    def seconds(self, row: Candidate, link: Link) -> float:
        """Those of a step, the mean over those with and without an exchange."""
        return step_seconds(self.parts(row, link), every=row.every, buckets=self.buckets)

    def best_dense(self, rows: tuple[Candidate, ...], link: Link) -> float:
        """Seconds of the fastest dense row."""
        return min(self.seconds(row, link) for row in rows if row.dense)

    def row(self, own: Candidate, rows: tuple[Candidate, ...], error: float | None) -> PlanRow:
        """What a plan says of one of the rows."""
        link, every = self.measured.link, own.every
        seconds, parts = self.seconds(own, link), self.parts(own, link)
        slow = [c for c in self.sent[own.name] if self.groups.slow in (c.axes or ())]
        return PlanRow(
            name=own.name,
            code=own.code(self.groups.axis_name),
            seconds=seconds,
            speed_up=self.best_dense(rows, link) / seconds,
            wire_bytes=sum(c.bytes for c in slow) / every,
            link_bytes=sum(c.link_bytes(c.workers or 1) for c in slow) / every,
            break_even=None if own.dense else self.break_even(own, rows),
            error=error,
            loss=own.loss,
            steps=own.steps,
            every=every,
            momentum=own.momentum,
            parts=Parts(parts.step, *(part / every for part in parts[1:])),
        )

    def break_even(self, row: Candidate, rows: tuple[Candidate, ...]) -> float:
        """The bandwidth where the best dense row begins to be faster, looked for from this link on.

        Upwards, if the row is faster here; else downwards. Either end may be without one: an
        exchange of fewer rounds and more bytes wins over fast links alone.
        """

        def is_faster(bandwidth: float) -> bool:
            link = dataclasses.replace(self.measured.link, bandwidth=bandwidth)
            return self.seconds(row, link) < self.best_dense(rows, link)

        at = self.measured.link.bandwidth
        here = is_faster(at)
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
