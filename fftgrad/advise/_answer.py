"""What a plan says: its rows, the best first."""

from typing import NamedTuple

from fftgrad.advise._convergence import Loss
from fftgrad.advise._cost import Parts
from fftgrad.advise._link import Link


class PlanRow(NamedTuple):
    """What a plan says of one candidate. `print(row)` is the code to paste.

    Attributes:
      name: the candidate's.
      code: the expression that makes it, to put before the optimizer; with local steps, around it.
      seconds: a step takes, predicted, the mean over those with and without an exchange.
      speed_up: how many times the steps of the best dense row.
      wire_bytes: that a worker hands to the collectives, each step on average.
      link_bytes: that leave a worker over its slow link, each step on average.
      break_even: the bandwidth in bytes per second up to which it is faster than the best dense. If
        it is faster over this link, the next one above, inf if dense wins over none; if it is not,
        the next one below, 0 if it wins over none. None for dense.
      error: the relative error of what is sent of a gradient, if one was given.
      loss: what to expect of the loss, from short runs of small models with 8 workers, or 4.
      steps: how many times dense's steps it took to dense's loss there, where that is known.
      every: steps between two exchanges.
      momentum: whether the optimizer keeps its momentum.
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
    momentum: bool
    parts: Parts

    @property
    def to_loss(self) -> float:
        """Seconds that it takes to get as far as dense gets in a step."""
        return self.seconds * self.steps

    def __str__(self) -> str:
        if self.every > 1:
            return f"{self.code}  # around your optimizer; parameters have a row for each worker"
        if self.momentum:
            return self.code
        return f"{self.code}  # before an optimizer without momentum: feedback is one"


class Plan(NamedTuple):
    """What `fg.advise.plan` found.

    Attributes:
      rows: the best first: the fastest to the same loss of those that trained like dense, or nearly
        so; a dense row, if none of them is a tenth faster. Then all whose loss is to be checked.
      workers: how many there are.
      link: of each worker.
      compress: whether the first row compresses.
    """

    rows: tuple[PlanRow, ...]
    workers: int
    link: Link

    @property
    def best(self) -> PlanRow:
        """The first row."""
        return self.rows[0]

    @property
    def compress(self) -> bool:
        """Whether compressing pays; if not, the best is dense."""
        return self.best.break_even is not None

    def __str__(self) -> str:
        head = f"{'':32}{'s a step':>9}{'x dense':>9}{'MB/link':>10}  loss"
        lines = [
            f"{row.name:32}{row.seconds:>9.3g}{row.speed_up:>9.2f}{row.link_bytes / 1e6:>10.4g}  "
            f"{row.loss}"
            for row in self.rows
        ]
        return "\n".join([head, *lines])
