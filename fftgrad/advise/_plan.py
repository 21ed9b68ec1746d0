"""Whether compressing would make training faster, and with what."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import fftgrad as fg
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_choice
from fftgrad.advise import _alone, _answer, _exchange, _inputs, _measure, _table, _timing
from fftgrad.advise._answer import Model, Plan
from fftgrad.advise._candidate import Candidate
from fftgrad.advise._cost import Algorithm
from fftgrad.advise._exchange import Timing
from fftgrad.advise._gradients import GradientLog
from fftgrad.advise._link import Link
from fftgrad.advise._measure import Asked
from fftgrad.exchanges import _layout
from fftgrad.ops import _collectives


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

    What is not given is measured, as `fg.advise.measure` does: in several processes all have to
    call it at once, with the mesh.

    Args:
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms"; or a function without
        arguments that makes one and returns what to wait for: `lambda: grad_step(w, x, y)`.
      link: that of each worker, `fg.advise.Link("1gbit", "100us")`, or its bandwidth alone:
        "1gbit"; if left out, that of the mesh; with `fast`, the slow one.
      workers: how many there are; with `fast`, all of them; if left out, those of the mesh.
      fast: how many workers fast links join, such as the GPUs of one machine, and their link, which
        is not measured: `(8, fg.advise.Link("50GB/s", "10us"))`. The exchanges are then
        `Hierarchical`, over two axes.
      mesh: that of the workers.
      axis_name: the axis, or axes, of the workers, for the code; with `fast`, the slow axis and the
        fast one. If left out, "data", or ("slow", "fast").
      timings: of each row by its name, as in `Measured`. If left out, those of the default rows
        come from a table of a named machine, by how long a memory copy takes here, and rows of your
        own are timed: of more than four million values by a smaller model, in proportion.
      gradients: trees like `params`, of which the errors are measured, or what
        `fg.advise.load_gradients` returned; also to time with, in place of heavy-tailed random
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
      Agarwal et al., MLSys 2022, arXiv:2103.00543: of 200 set-ups 6 beat well-tuned dense training.
    """
    asked = _measure.ask(
        "plan", params, step, workers, link, fast, mesh, axis_name, rows, gradients, buckets
    )
    if not any(row.dense for row in asked.rows):
        raise ValueError(
            "plan(rows): must have a dense row to compare with, got "
            f"{[row.name for row in asked.rows]}; add "
            "fg.advise.Candidate('dense', fg.AllReduce(), dense=True)."
        )
    check_choice("plan(algorithm)", algorithm, get_args(Algorithm))
    if timings is not None:
        _check_timings(timings, asked)
    timings, source = _timings(asked, timings, measure)
    measured = _measure.complete(asked, seconds, tell, timings, exact=measure)
    axes, like = asked.groups.axes, asked.like
    chosen = tuple(_cut(row, like, asked.buckets) for row in asked.rows)
    few, times = _inputs.part(like) if asked.default else (like, 1)
    known = {row.name: _sent(row, few, axes) for row in chosen}
    sent = {name: own for name, (own, _) in known.items()}
    kept = {name: own * times for name, (_, own) in known.items()}
    model = Model(measured, asked.groups, asked.buckets, algorithm, sent, kept, times)
    errors = [_error(row, axes, asked.gradients) if asked.gradients else None for row in chosen]
    found = [model.row(row, chosen, e) for row, e in zip(chosen, errors, strict=True)]
    return Plan(_answer.sort(found), measured, source)


def _timings(
    asked: Asked, given: Mapping[str, Timing] | None, measure: bool
) -> tuple[Mapping[str, Timing] | None, str]:
    """What is known of them, None if they are to be measured, and where they are from."""
    if given is not None:
        return given, "Codec times: as given."
    if asked.default and not measure and _table.has(asked.rows):
        agree = _timing.agreement(asked.mesh, asked.groups.axis_name)
        return _table.timings(asked.rows, asked.like, asked.groups, agree)
    if measure or _inputs.count(asked.like) <= _measure.LARGEST:
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
    total = _inputs.count(like)
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
            return exchange.mean(bucket, exchange.init(bucket), channel).sent

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
