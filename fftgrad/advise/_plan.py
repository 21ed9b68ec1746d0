"""Whether compressing would make training faster, and with what."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree, Step
from fftgrad._values import check_choice
from fftgrad.advise import _exchange, _inputs, _measure, _units
from fftgrad.advise._answer import Plan, PlanRow
from fftgrad.advise._candidate import Candidate
from fftgrad.advise._convergence import Loss
from fftgrad.advise._cost import Algorithm
from fftgrad.advise._exchange import Timing
from fftgrad.advise._gradient_log import GradientLog
from fftgrad.advise._inputs import Fast
from fftgrad.advise._link import Link
from fftgrad.advise._predict import Known, Setting, predict
from fftgrad.exchanges import _layout
from fftgrad.exchanges._hierarchical import Hierarchical
from fftgrad.ops import _collectives

ACCEPTED: tuple[Loss, ...] = ("as dense", "close")
MARGIN = 0.1
"""By how much a row must be faster to the same loss than the best dense to be put before it: what
is predicted has an error of about that."""


def plan(
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float,
    workers: int,
    fast: Fast | None = None,
    axis_name: AxisName | None = None,
    timings: Mapping[str, Timing] | None = None,
    gradients: Sequence[PyTree] | GradientLog | None = None,
    buckets: int | None = None,
    algorithm: Algorithm = "fastest",
    rows: Sequence[Candidate] | None = None,
    seconds: float = 0.5,
    tell: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Function: would compressing make training faster, and with what?

    It predicts the seconds of a step for a dense mean in float32 and in bfloat16, for every family
    of exchange and codec that fits, and for local steps: the step itself, what the exchange takes
    on this device, and what its collectives take over the links; docs/plan.md has the model, and
    how far it was from measured runs. Then it says which is fastest, which may be none.

    Speed is not all: a row trains with other gradients. `loss` says what came of that in short runs
    of small models, and only rows that were as dense or close to it are put before dense. Where a
    row took more steps than dense to the same loss, the order counts them.

    Args:
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: that of each worker, `fg.advise.Link("1gbit", "100us")`, or its bandwidth alone:
        "1gbit".
      workers: how many there are; with `fast`, all of them.
      fast: how many workers fast links join, such as the GPUs of one machine, and their link:
        `(8, fg.advise.Link("50GB/s", "10us"))`. The exchanges are then `Hierarchical`, over two
        axes.
      axis_name: the axis, or axes, of the workers, for the code; with `fast`, the slow axis and the
        fast one. If left out, "data", or ("slow", "fast").
      timings: what `fg.advise.measure` found. If left out, each candidate is timed here and now,
        which takes minutes for a large model.
      gradients: trees like `params`, of which the errors are measured, or what
        `fg.advise.load_gradients` returned; also to time with.
      buckets: in how many the gradient leaves while the backward pass runs, all but the last of
        which hide behind it; 1 where the compiler hides nothing. If left out, 1 on a CPU and 8
        elsewhere, dense rows included; the code then cuts the gradient.
      algorithm: of the collectives, "ring" or "tree", or for each the faster of a ring and what
        libraries use for short messages; docs/plan.md says which use what.
      rows: what to compare, in place of the default candidates; one at least must be dense.
      seconds: for the rounds of each timing.
      tell: hears the name of each row before it is timed, such as `print`.

    Returns:
      A `Plan`. `print(plan)` is the table, `print(plan.best)` the code. The same for the same
      arguments, where `timings` are among them.

    Wire: nothing is sent.

    Raises:
      TypeError: if a leaf is not what `compressed_pmean` takes.
      ValueError: if there is no dense row, two rows have one name, a timing is missing, is negative
        or of other workers, the workers are no multiple of the fast ones, or no more than those, or
        gradients are not like `params`, are zeros or not finite.

    Example:
      >>> import fftgrad as fg
      >>> import jax
      >>> params = jax.ShapeDtypeStruct((1000, 1000), "float32")
      >>> from fftgrad.advise import Candidate, Timing
      >>> dense = Candidate("dense", fg.AllReduce(), dense=True)
      >>> signs = Candidate("signs", fg.AllGather(fg.Sign()), loss="close")
      >>> timings = {"dense": Timing(0.001, 0.001), "signs": Timing(0.003, 0.005)}
      >>> found = fg.advise.plan(
      ...     params, step="20ms", link="100mbit", workers=4, rows=[dense, signs],
      ...     timings=timings, buckets=1,
      ... )
      >>> print(f"{found.best.speed_up:.1f} times: {found.best}")
      8.6 times: fg.compressed_pmean(fg.AllGather(codec=fg.Sign()), axis_name='data')

    References:
      Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems",
      MLSys 2022, arXiv:2103.00543: of 200 set-ups 6 beat well-tuned dense training.
    """
    groups = _inputs.groups("plan", workers, fast, axis_name)
    like = _inputs.like_of("plan", params)
    inputs = _inputs.gradients_of("plan", gradients, like)
    chosen = _measure.chosen_rows("plan", rows, like, groups)
    _check_dense(chosen)
    check_choice("plan(algorithm)", algorithm, get_args(Algorithm))
    buckets, link = _measure.bucket_count("plan", buckets), _inputs.link_of(link)
    setting = Setting(_units.seconds("plan(step)", step), link, groups, buckets, algorithm)
    if timings is None:
        apart = buckets > 1
        timings = _measure.timings(like, chosen, groups.axes, inputs, seconds, tell, apart=apart)
    _check_timings(timings, chosen, groups.sizes)
    if buckets > 1:
        chosen = [_cut(row, _bucket_bytes(like, buckets)) for row in chosen]
    known = [_know(row, like, groups.axes, timings[row.name], inputs) for row in chosen]
    dense = [row for row in known if row.candidate.dense]
    return Plan(tuple(_sorted([predict(row, dense, setting) for row in known])), workers, link)


def _check_dense(rows: Sequence[Candidate]) -> None:
    if not any(row.dense for row in rows):
        raise ValueError(
            f"plan(rows): must have a dense row to compare with, got {[row.name for row in rows]}; "
            "add fg.advise.Candidate('dense', fg.AllReduce(), dense=True)."
        )


def _check_timings(
    timings: Mapping[str, Timing], rows: Sequence[Candidate], workers: tuple[int, ...]
) -> None:
    given: object = timings
    missing = [row.name for row in rows if not isinstance(given, Mapping) or row.name not in given]
    if missing:
        raise ValueError(
            f"plan(timings): must have all rows, got none of {missing[0]!r}; measure with the same "
            "rows, or leave timings out."
        )
    for row in rows:
        _exchange.check_timing(f"plan(timings[{row.name!r}])", timings[row.name], workers)


def _know(
    row: Candidate,
    like: PyTree,
    axes: Mapping[str, int],
    timing: Timing,
    gradients: Sequence[PyTree] | None,
) -> Known:
    error = _error(row, axes, gradients) if gradients else None
    tx = row.transformation(_exchange.axis_of(axes))
    sent = _exchange.traffic("plan(rows)", tx, like, axes, row.every)
    return Known(row, sent, timing, error)


def _error(row: Candidate, axes: Mapping[str, int], gradients: Sequence[PyTree]) -> float:
    """How far what is sent of the gradients is from them."""
    exchange, axis = row.exchange, next(iter(axes))
    if isinstance(exchange, Hierarchical):  # whose groups keep what the links between them lose
        exchange = exchange.slow
    # One worker, where the exchange does not say how many, because all but one may send nothing.
    workers = getattr(exchange, "workers", 1)
    layout = row.layout.for_exchange(exchange)

    @jax.jit
    def lost(gradient: PyTree, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        def sent(bucket: PyTree) -> PyTree:
            return exchange.mean(bucket, exchange.init(bucket), Step.of(0), axis).sent

        buckets = _layout.to_buckets(jax.tree.map(jnp.asarray, gradient), layout)
        both = [(bucket, _collectives.alone(sent, {axis: workers})(bucket)) for bucket in buckets]
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


def _bucket_bytes(like: PyTree, buckets: int) -> int:
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    return 4 * max(1, -(-total // buckets))


def _cut(row: Candidate, bucket_bytes: int) -> Candidate:
    """The candidate with a gradient in buckets, unless it has its own or nothing hides."""
    if row.every > 1 or row.layout.bucket_bytes is not None:
        return row
    layout = dataclasses.replace(row.layout, bucket_bytes=bucket_bytes)
    return dataclasses.replace(row, layout=layout)


def _sorted(rows: list[PlanRow]) -> list[PlanRow]:
    best_dense = min(row.seconds for row in rows if row.break_even is None)

    def place(row: PlanRow) -> tuple[int, float]:
        if row.break_even is None:
            return 1, row.seconds
        if row.loss not in ACCEPTED:
            return 3, row.to_loss
        return (0 if row.to_loss * (1 + MARGIN) < best_dense else 2), row.to_loss

    return sorted(rows, key=place)
