"""Plans: whether compression makes training faster, and which."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

import jax

from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice, check_count
from fftgrad.ops._collectives import Collective
from fftgrad.planning import _inputs, _link, _predict, _table
from fftgrad.planning._candidates import Candidate, Loss, candidates, check_rows
from fftgrad.planning._inputs import Groups
from fftgrad.planning._link import Link
from fftgrad.planning._predict import Algorithm, Parts, Timing, exchange_seconds, step_seconds
from fftgrad.planning._text import quantity, table, three_digits

ACCEPTED: tuple[Loss, ...] = ("as dense", "close")
MARGIN = 0.1
"""A row comes before the best dense if it is so much faster to the same loss, which is about the
error of a prediction."""
SLOWEST, FASTEST = 1e3, 1e13
"""Bytes per second between which a break-even is searched."""


class PlanRow(NamedTuple):
    """The prediction for one candidate. `print(row)` is the code to paste.

    Attributes:
      name: the candidate's.
      code: the expression that makes it, to put before the optimizer, in its place if it is a whole
        one, or with local steps around it.
      seconds: predicted for a step, the mean over steps with and without an exchange.
      speed_up: steps in the time of one step of the best dense row.
      link_bytes: that leave a worker over its slow link, each step on average.
      break_even: the bandwidth in bytes per second up to which it is faster than the best dense. If
        it is faster over this link, the next break-even above, or inf; if not, the next one below,
        or 0. None for dense.
      loss: the class of its final loss in runs of small models with 8 workers, or 4.
      steps: steps to dense's loss there, in units of dense's steps, if that is known.
      every: steps between two exchanges.
      whole: True if the code is a whole optimizer instead of the user's.
      parts: the seconds of a step's parts, with a step's share of an exchange.
    """

    name: str
    code: str
    seconds: float
    speed_up: float
    link_bytes: float
    break_even: float | None
    loss: Loss
    steps: float
    every: int
    whole: bool
    parts: Parts

    @property
    def is_dense(self) -> bool:
        """True for a row with which the others are compared."""
        return self.break_even is None

    @property
    def to_loss(self) -> float:
        """Seconds to the loss that dense reaches in a step."""
        return self.seconds * self.steps

    @property
    def place(self) -> str:
        """The place of the code, if that is not a chain."""
        local = "; parameters have a row for each worker" if self.every > 1 else ""
        if self.whole:
            return f"in place of your optimizer, with its own learning rate{local}"
        return f"around your optimizer{local}" if local else ""

    def __str__(self) -> str:
        return f"{self.code}  # {self.place}" if self.place else self.code


class Plan(NamedTuple):
    """The result of `fg.planning.plan`. `print(plan)` shows a table.

    Attributes:
      rows: the best first: rows "as dense" or "close" that reach the same loss a tenth sooner than
        dense, then dense, then other such rows, then the rows of other classes.
      source: the source of the codec times, as a sentence.
    """

    rows: tuple[PlanRow, ...]
    source: str = ""

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
        """True if compression pays; if not, the best row is dense."""
        return not self.best.is_dense

    def __str__(self) -> str:
        head = ("exchange", "a step", "times", "codec", "link", "pays below", "loss")
        cells = [
            (
                row.name,
                quantity(row.seconds, "s"),
                three_digits(row.speed_up),
                quantity(row.parts.compress + row.parts.decompress, "s"),
                quantity(row.link_bytes, "B"),
                below(row.break_even),
                row.loss,
            )
            for row in self.rows
        ]
        return "\n".join([table(head, cells, (0, 6)), *textwrap.wrap(self.source, 80)])


def below(break_even: float | None) -> str:
    """A break-even in bits per second, or in words."""
    if break_even is None:
        return ""
    if not break_even:
        return "never"
    return "any link" if math.isinf(break_even) else quantity(8 * break_even, "bit/s")


def sort(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Sort rows as a plan has them, the best first."""
    best_dense = min(row.seconds for row in rows if row.is_dense)

    def place(row: PlanRow) -> tuple[int, float]:
        if row.is_dense:
            return 1, row.seconds
        if row.loss not in ACCEPTED:
            return 3, row.to_loss
        return (0 if row.to_loss * (1 + MARGIN) < best_dense else 2), row.to_loss

    return tuple(sorted(rows, key=place))


class Model(NamedTuple):
    """The inputs of all predictions of a plan; timings and traffic by the names of rows."""

    step: float
    link: Link
    groups: Groups
    buckets: int
    algorithm: Algorithm
    timings: Mapping[str, Timing]
    sent: Mapping[str, tuple[Collective, ...]]
    times: int = 1  # how often `sent` is sent

    def parts(self, row: Candidate, link: Link) -> Parts:
        """The parts of a step that exchanges."""
        links, timing = self.groups.links(link), self.timings[row.name]
        exchange = self.times * exchange_seconds(self.sent[row.name], links, self.algorithm)
        return Parts(self.step, timing.compress, exchange, timing.decompress)

    def seconds(self, row: Candidate, link: Link) -> float:
        """Seconds of a step, the mean over steps with and without an exchange."""
        return step_seconds(self.parts(row, link), every=row.every, buckets=self.buckets)

    def best_dense(self, rows: Sequence[Candidate], link: Link) -> float:
        """Seconds of the fastest dense row."""
        return min(self.seconds(row, link) for row in rows if row.dense)

    def row(self, own: Candidate, rows: Sequence[Candidate]) -> PlanRow:
        """The prediction for one of the rows."""
        seconds, parts = self.seconds(own, self.link), self.parts(own, self.link)
        slow = [c for c in self.sent[own.name] if self.groups.slow in (c.axes or ())]
        return PlanRow(
            name=own.name,
            code=own.code(self.groups.axis_name),
            seconds=seconds,
            speed_up=self.best_dense(rows, self.link) / seconds,
            link_bytes=self.times * sum(c.link_bytes(c.workers or 1) for c in slow) / own.every,
            break_even=None if own.dense else self.break_even(own, rows),
            loss=own.loss,
            steps=own.steps,
            every=own.every,
            whole=own.optimizer is not None,
            parts=Parts(parts.step, *(part / own.every for part in parts[1:])),
        )

    def break_even(self, row: Candidate, rows: Sequence[Candidate]) -> float:
        """The next bandwidth at which the row and the best dense take equally long.

        The search goes up from this link if the row is faster here, else down. It may find none: an
        exchange of fewer rounds and more bytes wins over fast links only.
        """

        def is_faster(bandwidth: float) -> bool:
            link = dataclasses.replace(self.link, bandwidth=bandwidth)
            return self.seconds(row, link) < self.best_dense(rows, link)

        at = self.link.bandwidth
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


def plan(
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float,
    workers: int,
    fast: tuple[int, Link] | None = None,
    axis_name: AxisName | None = None,
    timings: Mapping[str, Timing] | None = None,
    buckets: int | None = None,
    algorithm: Algorithm = "fastest",
    rows: Sequence[Candidate] | None = None,
    measure: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Function: predict whether compression makes training faster, and which.

    It predicts the seconds of a step for a dense mean in float32 and in bfloat16, for every family
    of exchange and codec that fits, and for local steps. A step is the step itself, the codec time
    on this device, and the time of the collectives over the links. docs/results/predictions.md has
    the model and its errors. The best row may be a dense one.

    `loss` is the class of a row's loss in short runs of small models. Only rows "as dense" or
    "close" come before dense. If a row took more steps than dense to the same loss, the order
    counts them.

    Args:
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: that of each worker, `fg.planning.Link("1gbit", "100us")` or what
        `fg.planning.measure_link` returned, or its bandwidth alone: "1gbit"; with `fast`, the slow
        one.
      workers: number of workers; with `fast`, of all groups together.
      fast: number of workers that fast links join, such as the GPUs of a machine, and their link:
        `(8, fg.planning.Link("50GB/s", "10us"))`. The exchanges are then `Hierarchical`, over two
        axes.
      axis_name: the axis, or axes, of the workers, for the code; with `fast`, the slow axis and the
        fast one. If left out, "data", or ("slow", "fast").
      timings: of each row by its name. If left out, those of the default rows come from a table of
        a named machine, scaled by the time of a memory copy here. Rows of your own are timed; a
        model of more than four million values by a smaller one, in proportion.
      buckets: number of messages of a gradient, all but the last of which overlap the backward
        pass. If left out, 1 on a CPU and 8 elsewhere, also for dense rows; the code says so.
      algorithm: of the collectives: "ring", "tree", or for each the faster of a ring and the
        algorithm of libraries for short messages (docs/results/predictions.md).
      rows: candidates to compare instead of the default ones; one at least must be dense.
      measure: True to time each row here for the whole model, which takes minutes and its memory.
      tell: called with the name of each row before it is timed, such as `print`.

    Returns:
      A `Plan`. `print(plan)` is the table, `print(plan.best)` the code. With `timings`, equal
      arguments give equal plans.

    Raises:
      ValueError: if there is no dense row, two rows have one name, or a timing is missing.

    Example:
      >>> params = jax.ShapeDtypeStruct((1000, 1000), "float32")
      >>> from fftgrad.planning import Candidate, Timing
      >>> dense = Candidate("dense", fg.AllReduce(), dense=True)
      >>> signs = Candidate("signs", fg.AllGather(fg.Sign()), loss="close")
      >>> timings = {"dense": Timing(0.001, 0.001), "signs": Timing(0.003, 0.005)}
      >>> found = fg.planning.plan(
      ...     params, step="20ms", link="100mbit", workers=4, rows=[dense, signs],
      ...     timings=timings, buckets=1,
      ... )
      >>> print(f"{found.best.speed_up:.1f} times: {found.best}")
      8.6 times: fg.compressed_pmean(fg.AllGather(codec=fg.Sign()), axis_name='data')

    References:
      Agarwal et al., MLSys 2022, arXiv:2103.00543: of 200 set-ups 6 beat well-tuned dense training.
    """
    check_choice("plan(algorithm)", algorithm, get_args(Algorithm))
    joined, like = _inputs.groups(workers, fast, axis_name), _inputs.like_of("plan", params)
    own, over = _link.seconds("plan(step)", step), Link.of(link)
    if buckets is None:  # XLA overlaps nothing on a CPU
        buckets = 1 if jax.default_backend() == "cpu" else 8
    check_count("plan(buckets)", buckets, "use 1 for no overlap.")
    few, times = _inputs.part(like) if rows is None else (like, 1)
    default = candidates(like, *joined.sizes, list(joined.axes)[-1]) if rows is None else rows
    compared = check_rows(default)
    source = "Codec times: as given."
    if timings is None:
        if rows is None and not measure and _table.in_table(compared):
            timings, source = _table.from_table(compared, like, joined)
        else:
            timings, source = _table.timed_here(compared, like, joined, measure, tell)
    if missing := [row.name for row in compared if row.name not in timings]:
        raise ValueError(
            f"plan(timings): must have all rows, got none of {missing}; measure with the same "
            "rows, or leave timings out."
        )
    cut = tuple(_cut(row, like, buckets) for row in compared)
    sent = {row.name: _sent(row, few, joined) for row in cut}
    model = Model(own, over, joined, buckets, algorithm, timings, sent, times)
    return Plan(sort([model.row(row, cut) for row in cut]), source)


def _cut(row: Candidate, like: PyTree, buckets: int) -> Candidate:
    """The candidate with a gradient in buckets, unless it has its own or nothing overlaps."""
    bucketing = row.recipe.bucketing
    if buckets == 1 or row.every > 1 or bucketing.bucket_bytes is not None:
        return row
    total = _inputs.count(like)
    cut = dataclasses.replace(bucketing, bucket_bytes=4 * max(1, -(-total // buckets)))
    return dataclasses.replace(row, method=dataclasses.replace(row.recipe, bucketing=cut))


def _sent(row: Candidate, like: PyTree, joined: Groups) -> tuple[Collective, ...]:
    """The collectives of a worker from one exchange to the next."""
    tx = row.transformation(_inputs.axis_of(joined.axes))
    return _predict.traffic("plan(rows)", tx, like, joined.axes, row.every)
