"""Whether compressing would make training faster, and with what."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import fftgrad as fg
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice
from fftgrad.exchanges import _layout
from fftgrad.ops import _collectives
from fftgrad.ops._collectives import Collective
from fftgrad.planning import _alone, _exchange, _measure, _timing
from fftgrad.planning._candidates import Candidate
from fftgrad.planning._convergence import Loss
from fftgrad.planning._exchange import Groups, Timing
from fftgrad.planning._gradients import GradientLog
from fftgrad.planning._link import Algorithm, Link, Parts, exchange_seconds, step_seconds
from fftgrad.planning._measure import Asked, Measured

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
    """What `fg.planning.plan` found.

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


def plan(
    params: PyTree,
    *,
    step: Callable[[], Any] | str | float,
    link: Link | str | float | None = None,
    workers: int | None = None,
    fast: tuple[int, Link] | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    timings: Mapping[str, Timing] | None = None,
    gradients: Sequence[PyTree] | GradientLog | None = None,
    buckets: int | None = None,
    algorithm: Algorithm = "fastest",
    rows: Sequence[Candidate] | None = None,
    measure: bool = False,
    seconds: float = 0.5,
    tell: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Function: would compressing make training faster, and with what?

    It predicts the seconds of a step for a dense mean in float32 and in bfloat16, for every family
    of exchange and codec that fits, and for local steps: the step itself, what the exchange takes
    on this device, and what its collectives take over the links; docs/results/predictions.md has
    the model, and how far it was from measured runs. Then it says which is fastest, which may be
    none.

    Speed is not all: a row trains with other gradients. `loss` says what came of that in short runs
    of small models, and only rows that were as dense or close to it are put before dense. Where a
    row took more steps than dense to the same loss, the order counts them.

    What is not given is measured, as `fg.planning.measure` does: in several processes all have to
    call it at once, with the mesh.

    Args:
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms"; or a function without
        arguments that makes one and returns what to wait for: `lambda: grad_step(w, x, y)`.
      link: that of each worker, `fg.planning.Link("1gbit", "100us")`, or its bandwidth alone:
        "1gbit"; if left out, that of the mesh; with `fast`, the slow one.
      workers: how many there are; with `fast`, all of them; if left out, those of the mesh.
      fast: how many workers fast links join, such as the GPUs of one machine, and their link, which
        is not measured: `(8, fg.planning.Link("50GB/s", "10us"))`. The exchanges are then
        `Hierarchical`, over two axes.
      mesh: that of the workers.
      axis_name: the axis, or axes, of the workers, for the code; with `fast`, the slow axis and the
        fast one. If left out, "data", or ("slow", "fast").
      timings: of each row by its name, as in `Measured`. If left out, those of the default rows
        come from a table of a named machine, by how long a memory copy takes here, and rows of your
        own are timed: of more than four million values by a smaller model, in proportion.
      gradients: trees like `params`, of which the errors are measured, or what
        `fg.planning.load_gradients` returned; also to time with, in place of heavy-tailed random
        values of a fixed seed.
      buckets: in how many the gradient leaves while the backward pass runs, all but the last of
        which hide behind it. With 1 nothing hides, and what comes before the first message is not
        timed apart, which halves what there is to compile. If left out, 1 on a CPU and 8 elsewhere,
        dense rows included; the code then cuts the gradient.
      algorithm: of the collectives, "ring" or "tree", or for each the faster of a ring and what
        libraries use for short messages; docs/results/predictions.md says which use
        what.
      rows: what to compare, in place of the default candidates; one at least must be dense.
      measure: whether each row is timed here for the model as it is, which takes minutes, and the
        memory of it.
      seconds: the time that the rounds of each row and collective take, about. A round of each is
        made in any case, after two that are not counted, of which the first compiles.
      tell: hears the name of each thing before it is timed, such as `print`.

    Returns:
      A `Plan`. `print(plan)` is the table, `print(plan.best)` the code. The same for the same
      arguments, where `timings` are among them.

    Raises:
      ValueError: if there is no dense row, two rows have one name, or a timing is missing or of
        other workers.

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
    asked = _measure.ask(
        "plan", params, step, workers, link, fast, mesh, axis_name, rows, gradients, buckets
    )
    if not any(row.dense for row in asked.rows):
        raise ValueError(
            "plan(rows): must have a dense row to compare with, got "
            f"{[row.name for row in asked.rows]}; add "
            "fg.planning.Candidate('dense', fg.AllReduce(), dense=True)."
        )
    check_choice("plan(algorithm)", algorithm, get_args(Algorithm))
    if timings is not None:
        _check_timings(timings, asked)
    timings, source = _timings(asked, timings, measure)
    measured = _measure.complete(asked, seconds, tell, timings, exact=measure)
    axes, like = asked.groups.axes, asked.like
    chosen = tuple(_cut(row, like, asked.buckets) for row in asked.rows)
    few, times = _exchange.part(like) if asked.default else (like, 1)
    known = {row.name: _sent(row, few, axes) for row in chosen}
    sent = {name: own for name, (own, _) in known.items()}
    kept = {name: own * times for name, (_, own) in known.items()}
    model = Model(measured, asked.groups, asked.buckets, algorithm, sent, kept, times)
    errors = [_error(row, axes, asked.gradients) if asked.gradients else None for row in chosen]
    found = [model.row(row, chosen, e) for row, e in zip(chosen, errors, strict=True)]
    return Plan(sort(found), measured, source)


def _timings(
    asked: Asked, given: Mapping[str, Timing] | None, measure: bool
) -> tuple[Mapping[str, Timing] | None, str]:
    """What is known of them, None if they are to be measured, and where they are from."""
    if given is not None:
        return given, "Codec times: as given."
    if asked.default and not measure and _measure.in_table(asked.rows):
        agree = _timing.agreement(asked.mesh, asked.groups.axis_name)
        return _measure.from_table(asked.rows, asked.like, asked.groups, agree)
    if measure or _exchange.count(asked.like) <= _measure.LARGEST:
        return None, "Codec times: measured here."
    return None, (
        "Codec times: measured here for 4 million values, and in proportion beyond; measure=True "
        "times the model as it is."
    )


def _check_timings(timings: Mapping[str, Timing], asked: Asked) -> None:
    given: object = timings
    for row in asked.rows:
        if not isinstance(given, Mapping) or row.name not in given:
            raise ValueError(
                f"plan(timings): must have all rows, got none of {row.name!r}; measure with the "
                "same rows, or leave timings out."
            )
        argument = f"plan(timings[{row.name!r}])"
        _exchange.check_timing(argument, timings[row.name], asked.groups.sizes)


def _cut(row: Candidate, like: PyTree, buckets: int) -> Candidate:
    """The candidate with a gradient in buckets, unless it has its own or nothing hides."""
    layout = row.recipe.layout
    if buckets == 1 or row.every > 1 or layout.bucket_bytes is not None:
        return row
    total = _exchange.count(like)
    cut = dataclasses.replace(layout, bucket_bytes=4 * max(1, -(-total // buckets)))
    return dataclasses.replace(row, method=dataclasses.replace(row.recipe, layout=cut))


def _sent(
    row: Candidate, like: PyTree, axes: Mapping[str, int]
) -> tuple[tuple[_collectives.Collective, ...], int]:
    """What a worker sends, and the bytes of the state that it keeps."""
    tx = row.transformation(_exchange.axis_of(axes))
    state = jax.eval_shape(tx.init, like)
    sent = _exchange.traffic("plan(rows)", tx, like, state, axes, row.every)
    return sent, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _error(row: Candidate, axes: Mapping[str, int], gradients: Sequence[PyTree]) -> float:
    """How far what is sent of the gradients is from them."""
    exchange, axis = row.recipe.exchange, next(iter(axes))
    if isinstance(exchange, fg.Hierarchical):  # whose groups keep what the links between them lose
        exchange = exchange.slow
    # One worker, where the exchange does not say how many, because all but one may send nothing.
    workers = getattr(exchange, "workers", 1)
    layout = row.recipe.layout.for_exchange(exchange)

    @jax.jit
    def lost(gradient: PyTree, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        def sent(bucket: PyTree) -> PyTree:
            channel = fg.exchanges.Channel(axis, fg.Step.of(0))
            out = exchange.mean(bucket, exchange.init(bucket), channel)
            return jax.tree.map(jnp.subtract, bucket, out.error)

        buckets, _ = _layout.to_buckets(jax.tree.map(jnp.asarray, gradient), layout)
        both = [(bucket, _alone.alone(sent, {axis: workers})(bucket)) for bucket in buckets]
        pairs = [p for x, y in both for p in zip(*map(jax.tree.leaves, (x, y)), strict=True)]
        total = jnp.zeros(())
        return (
            sum((jnp.sum(((x - y) / unit) ** 2) for x, y in pairs), total),
            sum((jnp.sum((x / unit) ** 2) for x, _ in pairs), total),
        )

    sums = np.zeros(2)
    for gradient in gradients:  # in units of its largest value, whose square float32 may not hold
        unit = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradient) if leaf.size)
        sums += np.asarray(lost(gradient, jnp.float32(unit)), np.float64) * unit**2
    return math.sqrt(sums[0] / sums[1])
