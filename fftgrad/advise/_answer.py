"""What the model of a step says of each candidate, and in which order a plan says it."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from fftgrad.advise._candidate import Candidate
from fftgrad.advise._convergence import Loss
from fftgrad.advise._cost import Algorithm, Parts, exchange_seconds, step_seconds
from fftgrad.advise._inputs import Groups
from fftgrad.advise._link import Link
from fftgrad.advise._measure import Measured
from fftgrad.ops._collectives import Collective

ACCEPTED: tuple[Loss, ...] = ("as dense", "close")
MARGIN = 0.1
"""By how much a row must be faster to the same loss than the best dense to be put before it: what
is predicted has an error of about that."""


class PlanRow(NamedTuple):
    """What a plan says of one candidate. `print(row)` is the code to paste.

    Attributes:
      name: the candidate's.
      code: the expression that makes it, to put before the optimizer, in its place if it is a whole
        one, or with local steps around it.
      seconds: a step takes, predicted, the mean over those with and without an exchange.
      speed_up: how many times the steps of the best dense row.
      wire_bytes: that a worker hands to the collectives, each step on average.
      link_bytes: that leave a worker over its slow link, each step on average.
      break_even: the bandwidth in bytes per second up to which it is faster than the best dense. If
        it is faster over this link, the next one above, inf if dense wins over none; if it is not,
        the next one below, 0 if it wins over none. None for dense.
      error: the relative error of what is sent of a gradient, if one was given.
      loss: what to expect of the loss at the end, from runs of small models with 8 workers, or 4.
      steps: how many times dense's steps it took to dense's loss there, where that is known.
      every: steps between two exchanges.
      whole: whether the code is a whole optimizer, in place of the user's.
      memory: bytes that a worker keeps for it from step to step, with the state of the optimizer
        where that is a whole one.
      compile: seconds until it could begin, tracing included, where its times are from; 0 where
        that is not known.
      parts: the seconds of a step's parts; those of an exchange are a step's share.
    """

    name: str
    code: str
    seconds: float
    speed_up: float
    wire_bytes: float
    link_bytes: float
    break_even: float | None
    error: float | None
    loss: Loss
    steps: float
    every: int
    whole: bool
    memory: int
    compile: float
    parts: Parts

    @property
    def is_dense(self) -> bool:
        """Whether the others are compared with it."""
        return self.break_even is None

    @property
    def to_loss(self) -> float:
        """Seconds that it takes to get as far as dense gets in a step."""
        return self.seconds * self.steps

    @property
    def place(self) -> str:
        """Where it goes, if not into a chain."""
        local = "; parameters have a row for each worker" if self.every > 1 else ""
        if self.whole:
            return f"in place of your optimizer, at a learning rate of its own{local}"
        return f"around your optimizer{local}" if local else ""

    def __str__(self) -> str:
        return f"{self.code}  # {self.place}" if self.place else self.code


class Plan(NamedTuple):
    """What `fg.advise.plan` found.

    Attributes:
      rows: the best first: the fastest to the same loss of those that trained like dense, or nearly
        so; a dense row, if none of them is a tenth faster. Then all whose loss is to be checked.
      measured: what it rests on: the step, the link, the workers, and what each candidate takes.
      source: where the times of the codecs are from, as a sentence.
    """

    rows: tuple[PlanRow, ...]
    measured: Measured
    source: str = ""

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.measured.workers

    @property
    def link(self) -> Link:
        """That of each worker."""
        return self.measured.link

    @property
    def best(self) -> PlanRow:
        """The first row."""
        return self.rows[0]

    @property
    def dense(self) -> PlanRow:
        """The fastest dense row."""
        return min((row for row in self.rows if row.is_dense), key=lambda row: row.seconds)

    @property
    def compress(self) -> bool:
        """Whether compressing pays; if not, the best is dense."""
        return not self.best.is_dense

    def __str__(self) -> str:
        head = f"{'':32}{'s a step':>9}{'x dense':>9}{'MB/link':>10}  loss"
        lines = [
            f"{row.name:32}{row.seconds:>9.3g}{row.speed_up:>9.2f}{row.link_bytes / 1e6:>10.4g}  "
            f"{row.loss}"
            for row in self.rows
        ]
        return "\n".join([head, *lines, *textwrap.wrap(self.source, 80)])


def sort(rows: list[PlanRow]) -> tuple[PlanRow, ...]:
    """The rows as a plan has them."""
    best_dense = min(row.seconds for row in rows if row.is_dense)

    def place(row: PlanRow) -> tuple[int, float]:
        if row.is_dense:
            return 1, row.seconds
        if row.loss not in ACCEPTED:
            return 3, row.to_loss
        return (0 if row.to_loss * (1 + MARGIN) < best_dense else 2), row.to_loss

    return tuple(sorted(rows, key=place))


SLOWEST, FASTEST = 1e3, 1e13
"""Bytes per second between which a break-even is searched."""


class Model(NamedTuple):
    """What is the same for all rows; what each has of its own is by their names."""

    measured: Measured
    groups: Groups
    buckets: int
    algorithm: Algorithm
    sent: Mapping[str, tuple[Collective, ...]]
    memory: Mapping[str, int]
    times: int = 1  # how often `sent` is sent

    def parts(self, row: Candidate, link: Link) -> Parts:
        """The parts of a step that exchanges."""
        links = self.groups.links(link)
        exchange = self.times * exchange_seconds(self.sent[row.name], links, self.algorithm)
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
            wire_bytes=self.times * sum(c.bytes for c in slow) / every,
            link_bytes=self.times * sum(c.link_bytes(c.workers or 1) for c in slow) / every,
            break_even=None if own.dense else self.break_even(own, rows),
            error=error,
            loss=own.loss,
            steps=own.steps,
            every=every,
            whole=own.optimizer is not None,
            memory=self.memory[own.name],
            compile=self.measured.timings[own.name].compile,
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
