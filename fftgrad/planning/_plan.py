"""Plans: predict which exchange reaches the loss of dense training first."""

import dataclasses
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

import fftgrad as fg
from fftgrad._contracts import PyTree
from fftgrad._values import check, check_choice, check_count, check_transformation
from fftgrad.exchanges import _bucketing
from fftgrad.exchanges._bucketing import BUCKET_LIMIT
from fftgrad.ops._collectives import Collective
from fftgrad.planning import _devices, _predict, _text, _timing
from fftgrad.planning._candidates import Candidate, Loss, candidates, check_rows
from fftgrad.planning._predict import Algorithm, Groups, Link, Parts, count, sent_by
from fftgrad.planning._text import quantity, table, three_digits
from fftgrad.planning._timing import Timing

ACCEPTED: tuple[Loss, ...] = ("as dense", "close")
MARGIN = 0.1
"""A recommended row is at least 10 % faster than dense, because predictions err by about 10 %."""


class PlanRow(NamedTuple):
    """The prediction for one candidate. `print(row)` is the code to paste.

    Attributes:
      name: name of the candidate.
      code: Python expression: the first transformation of a chain, a complete optimizer, or local
        steps around an optimizer.
      seconds: seconds per step, the mean over steps with and without an exchange.
      link_bytes: mean bytes per step that a worker sends over its slow link.
      loss: class of the final loss in runs of small models with 4 or 8 workers.
      steps: steps to dense's loss, divided by dense's steps: measured, or assumed for the class.
      every: steps between two exchanges.
      whole: True if the code is a complete optimizer, which replaces the user's.
      parts: seconds per step of each part, averaged over steps with and without an exchange.
      is_dense: True for a dense row. The other rows are compared with the fastest dense row.
      why_not: reason why the row is not recommended, or "" for the recommended row.
    """

    name: str
    code: str
    seconds: float
    link_bytes: float
    loss: Loss
    steps: float
    every: int
    whole: bool
    parts: Parts
    is_dense: bool
    why_not: str = ""

    @property
    def to_loss(self) -> float:
        """Seconds until the loss falls as much as in one dense step."""
        return self.seconds * self.steps

    @property
    def place(self) -> str:
        """Place of the code in a program; "" for the first transformation of a chain."""
        local = "; parameters have a row for each worker" if self.every > 1 else ""
        if self.whole:
            return f"in place of your optimizer, with its own learning rate{local}"
        return f"around your optimizer{local}" if local else ""

    def __str__(self) -> str:
        return f"{self.code}  # {self.place}" if self.place else self.code


class Plan(NamedTuple):
    """The result of `fg.planning.plan`. `print(plan)` shows a table.

    Attributes:
      rows: the predictions, sorted by `to_loss`.
      source: where the codec times come from, in sentences.
    """

    rows: tuple[PlanRow, ...]
    source: str = ""

    @property
    def best(self) -> PlanRow:
        """The recommended row."""
        return next(row for row in self.rows if not row.why_not)

    @property
    def dense(self) -> PlanRow:
        """The fastest dense row."""
        return next(row for row in self.rows if row.is_dense)

    @property
    def compress(self) -> bool:
        """True if compression pays; if not, the recommended row is dense."""
        return not self.best.is_dense

    def __str__(self) -> str:
        head = ("exchange", "a step", "steps", "to loss", "codec", "Muon", "link", "why not")
        cells = [
            (
                row.name,
                quantity(row.seconds, "s"),
                three_digits(row.steps),
                quantity(row.to_loss, "s"),
                quantity(row.parts.compress + row.parts.decompress, "s"),
                quantity(row.parts.muon, "s") if row.parts.muon else "",
                quantity(row.link_bytes, "B"),
                row.why_not or "recommended",
            )
            for row in self.rows
        ]
        return "\n".join([table(head, cells, (0, 7)), *textwrap.wrap(self.source, 80)])


def sort(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Sort rows by seconds to dense's loss, and set `why_not` of all rows but the best."""
    ranked = sorted(rows, key=lambda row: row.to_loss)
    dense = next(row for row in ranked if row.is_dense)
    faster = (row for row in ranked if row.to_loss * (1 + MARGIN) < dense.to_loss)
    best = next((row for row in faster if row.loss in ACCEPTED), dense)

    def why_not(row: PlanRow) -> str:
        if row is best:
            return ""
        if not row.is_dense and row.loss not in ACCEPTED:
            return row.loss if row.loss == "not measured" else f"loss: {row.loss}"
        return "slower" if row.to_loss >= best.to_loss else f"under {MARGIN:.0%} faster"

    return tuple(row._replace(why_not=why_not(row)) for row in ranked)


def predict_row(
    row: Candidate,
    timing: Timing,
    sent: Sequence[Collective],
    buckets: int,
    step: float,
    link: Link,
    groups: Groups,
    algorithm: Algorithm,
) -> PlanRow:
    """Predict a row from the collectives `sent` in `row.every` steps."""
    compress, decompress, muon = timing
    exchange = _predict.exchange_seconds(sent, groups.links(link), algorithm)
    parts = Parts(step, compress, exchange, decompress, muon)
    slow, *_ = groups.axes
    over = (c.link_bytes(c.workers or 1) for c in sent if slow in (c.axes or ()))
    return PlanRow(
        name=row.name,
        code=row.code(groups.axis),
        seconds=_predict.step_seconds(parts, every=row.every, buckets=buckets),
        link_bytes=sum(over) / row.every,
        loss=row.loss,
        steps=row.to_loss,
        every=row.every,
        whole=row.optimizer is not None,
        parts=parts._replace(
            compress=compress / row.every,
            exchange=exchange / row.every,
            decompress=decompress / row.every,
        ),
        is_dense=row.dense,
    )


def plan(
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float,
    workers: int,
    fast: tuple[int, Link] | None = None,
    timings: Mapping[str, Timing] | None = None,
    buckets: int | None = None,
    algorithm: Algorithm = "fastest",
    rows: Sequence[Candidate] | None = None,
    device: str | os.PathLike[str] = "this",
    measure: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Function: predict which exchange, compressed or dense, reaches dense's loss first.

    The time per step includes backward pass and optimizer, codecs on the training device, and
    collectives over the links. Each exchange is a row. Rows are ranked by seconds per step times
    steps to dense's loss. docs/plan.md explains the ranking, docs/results/predictions.md the model
    and its errors.

    Args:
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: link of each worker, such as `fg.planning.Link("1gbit", "100us")`, or its bandwidth:
        "1gbit". With `fast`, the slow link.
      workers: total number of workers.
      fast: number of workers in a group with fast links, such as the GPUs of a machine, and the
        fast link: `(8, fg.planning.Link("50GB/s", "10us"))`. All exchanges are then `Hierarchical`,
        over the axes ("slow", "fast") instead of "data".
      timings: codec time of each row by its name. By default, default rows get the times that are
        predicted for `device`, and your own rows are timed on this device.
      buckets: number of buckets of a gradient; the exchange of all but the last overlaps the
        backward pass. The default is 1 on a CPU; elsewhere 1 or 8 for each row, the faster one.
      algorithm: algorithm of the collectives: "ring", "tree", or the "fastest" for each.
      rows: candidates to compare instead of the default ones; at least one must be dense.
      device: the device that will train: "h100", "a100", "l40s", "v5e", a file that `fftgrad bench`
        wrote, or "this" one, which is measured once and kept in a file, so that equal calls give
        equal plans.
      measure: True to time the default rows here too, which takes minutes and the model's memory.
      tell: function that is called with the name of each row before it is timed, such as `print`.

    Returns:
      A `Plan`. `print(plan)` shows the table, `print(plan.best)` the code to paste.

    Raises:
      ValueError: if no row is dense, two rows have the same name, or a timing is missing.

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
      >>> print(f"{found.best.to_loss:.3f} s: {found.best}")
      0.070 s: fg.compressed_pmean(fg.AllGather(codec=fg.Sign()), axis_name='data')

    References:
      Agarwal et al., MLSys 2022, arXiv:2103.00543: of 200 set-ups 6 beat well-tuned dense training.
    """
    check_choice("plan(algorithm)", algorithm, get_args(Algorithm))
    joined, like = _predict.groups(workers, fast), _timing.like_of("plan", params)
    own, over = _text.seconds("plan(step)", step), Link.of(link)
    place = None if device == "this" else _devices.find(device)
    usual = rows is None
    compared = check_rows(candidates(like, joined.slow, joined.fast) if usual else rows)
    source = "Codec times: as given."
    if timings is None:
        if usual and not measure:
            place = place or _devices.find("this")
            timings, source = _devices.from_table(compared, like, joined, place)
        else:
            rule = "be 'this' for rows of your own and to measure"
            remedy = "leave out measure, or pass timings of time_exchange on that device."
            check(place is None, "plan(device)", rule, device, remedy)
            source, timings = "Codec times: measured here.", {}
            for row in compared:
                tell(row.name)
                tx = row.transformation(joined.axis)
                timings[row.name] = _timing.time_exchange(tx, like, joined.axes, every=row.every)
    missing = [row.name for row in compared if row.name not in timings]
    remedy = "measure with the same rows, or leave timings out."
    check(not missing, "plan(timings)", "have all rows", f"none of {missing}", remedy)
    if buckets is None:
        platform = place.platform if place else jax.default_backend()
        tried = [1] if platform == "cpu" else [1, 8]  # XLA overlaps nothing on a CPU
    else:
        tried = [check_count("plan(buckets)", buckets, "use 1 for no overlap.")]

    def predicted(row: Candidate) -> Iterator[PlanRow]:
        found, pieces = _usual(row, like, joined) if usual else ((), 1)
        for number in tried:
            cut = _cut(row, like, number)
            if usual:
                times = pieces if row.every > 1 else max(pieces, number)
                sent = times * tuple(c._replace(bytes=c.bytes * pieces // times) for c in found)
            else:
                sent = _sent(cut, like, joined)
            yield predict_row(cut, timings[row.name], sent, number, own, over, joined, algorithm)

    best = [min(predicted(row), key=lambda one: one.seconds) for row in compared]
    dense = max(one.link_bytes for one in best if one.is_dense)
    for i, (row, one) in enumerate(zip(compared, best, strict=True)):
        if row.ratio and row.loss in ACCEPTED and dense > 2 * row.ratio * one.link_bytes:
            lower = dataclasses.replace(row, loss="check")
            best[i] = one._replace(loss=lower.loss, steps=lower.to_loss)
    source += _sharing(max(timing.muon for timing in timings.values()), like, over, joined)
    return Plan(sort(best), source)


def _sharing(muon: float, like: PyTree, link: Link, groups: Groups) -> str:
    """Return a sentence with Muon's time under `share_axis`, or "" if that saves no time."""
    axis, workers = list(groups.axes.items())[-1]
    share = 2 * -(-sum(map(math.prod, _devices.matrices(like))) // workers)
    shared = muon / workers
    shared += _predict.collective_seconds("all-gather", share, workers, groups.links(link)[axis])
    if shared >= muon:
        return ""
    took, instead = quantity(shared, "s"), quantity(muon, "s")
    return f" With share_axis={axis!r}, Muon's matrices take {took} in place of {instead}."


def _cut(row: Candidate, like: PyTree, buckets: int) -> Candidate:
    """Set the bucket size of a candidate, unless it has one or its exchange overlaps nothing."""
    bucketing = row.recipe.bucketing
    if buckets == 1 or row.every > 1 or bucketing.bucket_bytes is not None:
        return row
    total = count(like)
    cut = dataclasses.replace(bucketing, bucket_bytes=4 * max(1, -(-total // buckets)))
    return dataclasses.replace(row, method=dataclasses.replace(row.recipe, bucketing=cut))


def _sent(row: Candidate, like: PyTree, joined: Groups) -> tuple[Collective, ...]:
    """Return the collectives of a worker in `row.every` steps."""
    tx = row.transformation(joined.axis)
    return _predict.traffic("plan(rows)", tx, like, joined.axes, row.every)


def _usual(row: Candidate, like: PyTree, joined: Groups) -> tuple[tuple[Collective, ...], int]:
    """Return the collectives of a default row for one piece of a gradient, and the piece count.

    Low-rank rows need the shapes. The bytes of all other rows depend only on the number of values.
    """
    exchange, total = row.recipe.exchange, count(like)
    if isinstance(exchange, fg.PowerSgd | fg.exchanges.AcpSgd):
        parts = _bucketing.bucket_likes(like, row.recipe.bucketing.for_exchange(exchange))
        return tuple(c for part in parts for c in sent_by(exchange, part, joined.axes)), 1
    pieces = -(-total // BUCKET_LIMIT)
    vector = jax.ShapeDtypeStruct((-(-total // pieces),), jnp.float32)
    return sent_by(exchange, vector, joined.axes), pieces


def predict_step(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float | Mapping[str, Link],
    axes: Mapping[str, int],
    timing: Timing | None = None,
    every: int = 1,
    buckets: int = 1,
    algorithm: Algorithm = "fastest",
) -> float:
    """Function: predict the seconds per step of any optax chain, as `plan` does for candidates.

    It traces the chain to count its traffic. docs/results/predictions.md explains the model.

    Args:
      tx: the chain, without the optimizer if `step` includes the optimizer's time.
      params: parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: link of each worker, or its bandwidth: "1gbit"; or the link of each axis:
        `{"slow": ..., "fast": ...}`.
      axes: number of workers along each axis: `{"data": 16}`.
      timing: codec time. By default, `fg.planning.time_exchange` measures it on this device.
      every: number of local steps per exchange.
      buckets: number of buckets of a gradient that the chain's `Bucketing(bucket_bytes=...)` makes.
      algorithm: algorithm of the collectives, as in `fg.planning.plan`.

    Returns:
      Seconds per step, the mean over steps with and without an exchange.

    Raises:
      ValueError: if the traffic changes from step to step, or a collective is inside a loop.

    Example:
      >>> params = jax.ShapeDtypeStruct((5000, 5000), "float32")
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.001), axis_name="data")
      >>> timing = fg.planning.Timing(compress=0.05, decompress=0.02)
      >>> link = fg.planning.Link("1gbit", "100us")
      >>> seconds = fg.planning.predict_step(
      ...     dgc, params, step="300ms", link=link, axes={"data": 16}, timing=timing
      ... )
      >>> f"{seconds:.2f} s"
      '0.39 s'
    """
    check_transformation("predict_step(tx)", tx)
    check_count("predict_step(every)", every, "use 1 without local steps.")
    check_count("predict_step(buckets)", buckets, "use 1 for no overlap.")
    check_choice("predict_step(algorithm)", algorithm, get_args(Algorithm))
    like = _timing.like_of("predict_step", params)
    own = _text.seconds("predict_step(step)", step)
    given = link if isinstance(link, Mapping) else dict.fromkeys(axes, link)
    links = {axis: Link.of(one) for axis, one in given.items()}
    missing, rule = sorted({*axes} - {*links}), "have a link for each axis"
    remedy = "add fg.planning.Link('1gbit')."
    check(not missing, "predict_step(link)", rule, f"none for {missing}", remedy)
    timing = timing or _timing.time_exchange(tx, params, axes, every=every)
    sent = _predict.traffic("predict_step(tx)", tx, like, axes, every)
    exchange = _predict.exchange_seconds(sent, links, algorithm)
    parts = Parts(own, timing.compress, exchange, timing.decompress, timing.muon)
    return _predict.step_seconds(parts, every=every, buckets=buckets)
