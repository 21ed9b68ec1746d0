"""Whether compressing would make training faster, and with what."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import PyTree, Step
from fftgrad.exchanges import _layout
from fftgrad.exchanges._hierarchical import Hierarchical
from fftgrad.ops import _collectives
from fftgrad.planning import _exchange, _measure
from fftgrad.planning._answer import Plan, PlanRow
from fftgrad.planning._candidate import Candidate, candidates
from fftgrad.planning._convergence import Loss
from fftgrad.planning._exchange import Timing
from fftgrad.planning._measure import AXIS
from fftgrad.planning._predict import Known, Setting, predict
from fftgrad.tools import _units
from fftgrad.tools._cost import Algorithm
from fftgrad.tools._link import Link

ACCEPTED: tuple[Loss, ...] = ("as dense", "close")
MARGIN = 0.1
"""By how much a row must be faster than the best dense to be put before it: what is predicted has
an error of about that."""


def plan(
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float,
    workers: int,
    fast: tuple[int, Link] | None = None,
    timings: Mapping[str, Timing] | None = None,
    gradients: Sequence[PyTree] | None = None,
    buckets: int | None = None,
    algorithm: Algorithm = "ring",
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
    of small models, and only rows that were as dense or close to it are put before dense.

    Args:
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: that of each worker, `fg.Link("1gbit", "100us")`, or its bandwidth alone: "1gbit".
      workers: how many there are; with `fast`, all of them.
      fast: how many workers fast links join, such as the GPUs of one machine, and their link:
        `(8, fg.Link("50GB/s", "10us"))`. The exchanges are then `Hierarchical`, over the axes
        ("slow", "fast").
      timings: what `fg.measure` found. If left out, each candidate is timed here and now, which
        takes minutes for a large model.
      gradients: trees like `params`, of which the errors are measured; also to time with.
      buckets: in how many the gradient leaves while the backward pass runs, all but the last of
        which hide behind it; 1 where the compiler hides nothing. If left out, 1 on a CPU and 8
        elsewhere, dense rows included; the code then cuts the gradient.
      algorithm: of the collectives, "ring" or "tree".
      rows: what to compare, in place of the default candidates; one at least must be dense.
      seconds: for the rounds of each timing.
      tell: hears the name of each row before it is timed, such as `print`.

    Returns:
      A `Plan`. `print(plan)` is the table, `print(plan.best)` the code. The same for the same
      arguments, where `timings` are among them.

    Wire: nothing is sent.

    Raises:
      TypeError: if a leaf is not what `compressed_pmean` takes.
      ValueError: if there is no dense row, two rows have one name, a timing is missing, or the
        workers are no multiple of the fast ones, or no more than those.

    Example:
      >>> import fftgrad as fg
      >>> import jax
      >>> params = jax.ShapeDtypeStruct((1000, 1000), "float32")
      >>> dense = fg.Candidate("dense", fg.AllReduce(), dense=True)
      >>> signs = fg.Candidate("signs", fg.AllGather(fg.Sign()), loss="close")
      >>> timings = {"dense": fg.Timing(0.001, 0.001), "signs": fg.Timing(0.003, 0.005)}
      >>> found = fg.plan(
      ...     params, step="20ms", link="100mbit", workers=4, rows=[dense, signs],
      ...     timings=timings, buckets=1,
      ... )
      >>> print(f"{found.best.speed_up:.1f} times: {found.best}")
      8.6 times: fg.compressed_pmean(fg.AllGather(codec=fg.Sign()), axis_name='data')

    References:
      Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems",
      MLSys 2022, arXiv:2103.00543: of 200 set-ups 6 beat well-tuned dense training.
    """
    size, axes = _groups(workers, fast)
    _layout.check_tree("plan", "params", params)
    like = _layout.like(params)
    chosen = candidates(like, *size) if rows is None else tuple(rows)
    _check(chosen)
    buckets = _measure.bucket_count(buckets)
    _exchange.check_count("plan(buckets)", buckets, "use 1 for no overlap.")
    link = link if isinstance(link, Link) else Link(link)
    setting = Setting(_units.seconds("plan(step)", step), link, fast, buckets, algorithm)
    if timings is None:
        apart = buckets > 1
        timings = _measure.timings(like, chosen, axes, gradients, seconds, tell, apart=apart)
    if buckets > 1:
        chosen = [_cut(row, _bucket_bytes(like, buckets)) for row in chosen]
    known = [_know(row, like, axes, timings, gradients) for row in chosen]
    dense = [row for row in known if row.candidate.dense]
    found = [predict(row, dense, setting, _exchange.axis_of(axes)) for row in known]
    return Plan(tuple(_sorted(found)), workers, link)


def _groups(workers: int, fast: tuple[int, Link] | None) -> tuple[tuple[int, int], dict[str, int]]:
    if workers < 2:
        raise ValueError(
            f"plan(workers): must be at least 2, got {workers}; one exchanges nothing."
        )
    if fast is None:
        return (workers, 1), {AXIS: workers}
    if fast[0] < 2 or workers % fast[0]:
        raise ValueError(
            f"plan(fast): must be a divisor of the {workers} workers, and 2 at least, got "
            f"{fast[0]}; leave it out where no links are fast."
        )
    slow = workers // fast[0]
    if slow == 1:
        raise ValueError(
            f"plan(fast): must leave two groups at least, got all {workers} workers in one, which "
            "send nothing over a slow link; leave it out and give their link as link."
        )
    return (slow, fast[0]), {"slow": slow, "fast": fast[0]}


def _check(rows: Sequence[Candidate]) -> None:
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"plan(rows): must have a name each, got {names}; rename one.")
    if not any(row.dense for row in rows):
        raise ValueError(
            f"plan(rows): must have a dense row to compare with, got {names}; add "
            "fg.Candidate('dense', fg.AllReduce(), dense=True)."
        )


def _know(
    row: Candidate,
    like: PyTree,
    axes: Mapping[str, int],
    timings: Mapping[str, Timing],
    gradients: Sequence[PyTree] | None,
) -> Known:
    if row.name not in timings:
        raise ValueError(
            f"plan(timings): must have all rows, got none of {row.name!r}; measure with the same "
            "rows, or leave timings out."
        )
    error = _error(row, axes, gradients) if gradients else None
    tx = row.transformation(_exchange.axis_of(axes))
    sent = _exchange.traffic("plan(rows)", tx, like, axes, row.every)
    return Known(row, sent, timings[row.name], error)


def _error(row: Candidate, axes: Mapping[str, int], gradients: Sequence[PyTree]) -> float:
    """How far what is sent of the gradients is from them."""
    exchange, axis = row.exchange, next(iter(axes))
    if isinstance(exchange, Hierarchical):  # whose groups keep what the links between them lose
        exchange = exchange.slow
    # One worker, where the exchange does not say how many, because all but one may send nothing.
    workers = getattr(exchange, "workers", 1)
    layout = row.layout.for_exchange(exchange)

    @jax.jit
    def lost(gradient: PyTree) -> tuple[jax.Array, jax.Array]:
        def sent(bucket: PyTree) -> PyTree:
            return exchange.mean(bucket, exchange.init(bucket), Step.of(0), axis).sent

        buckets = _layout.to_buckets(jax.tree.map(jnp.asarray, gradient), layout)
        both = [(bucket, _collectives.alone(sent, {axis: workers})(bucket)) for bucket in buckets]
        pairs = [p for x, y in both for p in zip(*map(jax.tree.leaves, (x, y)), strict=True)]
        total = jnp.zeros(())
        return (
            sum((jnp.sum((x - y) ** 2) for x, y in pairs), total),
            sum((jnp.sum(x**2) for x, _ in pairs), total),
        )

    sums = np.sum([np.asarray(lost(gradient), np.float64) for gradient in gradients], axis=0)
    return math.sqrt(sums[0] / sums[1]) if sums[1] else 0.0


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
            return 3, row.seconds
        return (0 if row.seconds * (1 + MARGIN) < best_dense else 2), row.seconds

    return sorted(rows, key=place)
