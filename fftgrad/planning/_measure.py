"""What a plan rests on: the step, the link and codec times, measured or from a table."""

import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import fftgrad as fg
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_count
from fftgrad.planning import _exchange, _link, _timing
from fftgrad.planning._candidates import Candidate, candidates, check_rows
from fftgrad.planning._exchange import Groups, Timing
from fftgrad.planning._gradients import GradientLog
from fftgrad.planning._link import Link, measure_link
from fftgrad.planning._timing import Agree

LARGEST = 1 << 22
"""Values of the model that is timed in place of a larger one."""


class Measured(NamedTuple):
    """What a plan rests on; `plan(params, **measured._asdict())` makes one of it.

    Attributes:
      step: seconds of a step without any exchange.
      link: of each worker.
      workers: how many there are.
      timings: of each candidate, by its name.
      fast: how many workers fast links join, and their link, if that was given.
      axis_name: the axis, or axes, of the workers.
    """

    step: float
    link: Link
    workers: int
    timings: Mapping[str, Timing]
    fast: tuple[int, Link] | None = None
    axis_name: AxisName | None = None


def measure(
    params: PyTree,
    *,
    step: Callable[[], Any] | str | float,
    workers: int | None = None,
    link: Link | str | float | None = None,
    fast: tuple[int, Link] | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    rows: Sequence[Candidate] | None = None,
    gradients: Sequence[PyTree] | GradientLog | None = None,
    buckets: int | None = None,
    seconds: float = 0.5,
    tell: Callable[[str], object] = lambda _: None,
) -> Measured:
    """Function: what a plan rests on, measured on this device and over the links of a mesh.

    The arguments are those of `fg.planning.plan`. `rows` may be empty, where only the step or the
    link is of interest.

    An exchange is timed as one of so many equal workers, without the others: its own program with
    each collective replaced by what it would bring if all had sent the same. So one device is
    enough, for any number of workers, and decoding their payloads is in the time. What the links
    take is measured apart, by `fg.planning.measure_link`. In several processes all have to call it
    at once, with the mesh: they then begin together, the slowest of them counts, and they share
    processors as they do in training.

    Returns:
      A `Measured`.

    Wire: what `fg.planning.measure_link` sends, if it measures the link.

    Example:
      >>> rows = [fg.planning.Candidate("dense", fg.AllReduce(), dense=True)]
      >>> link = fg.planning.Link("1gbit", "100us")
      >>> measured = fg.planning.measure(
      ...     jnp.zeros(1000), step="20ms", workers=4, link=link, rows=rows, seconds=0.01
      ... )
      >>> measured.step, list(measured.timings)
      (0.02, ['dense'])
    """
    asked = ask(
        "measure", params, step, workers, link, fast, mesh, axis_name, rows, gradients, buckets
    )
    return complete(asked, seconds, tell)


class Asked(NamedTuple):
    """What is to be measured, or planned for, once all of it is known to be right."""

    owner: str  # the function, for errors
    like: PyTree  # the gradient, by its shapes
    step: Callable[[], Any] | float  # what is known of them; a function, or None, is measured
    link: Link | None
    groups: Groups  # the workers
    mesh: Mesh | None  # the one whose links are measured, or None
    rows: tuple[Candidate, ...]  # the candidates
    gradients: list[PyTree] | None  # those that are given, or None
    buckets: int  # in how many the gradient leaves
    default: bool  # whether the candidates are those that are compared unless others are given


def ask(
    owner: str,
    params: PyTree,
    step: Callable[[], Any] | str | float,
    workers: int | None,
    link: Link | str | float | None,
    fast: tuple[int, Link] | None,
    mesh: Mesh | None,
    axis_name: AxisName | None,
    rows: Sequence[Candidate] | None,
    gradients: Sequence[PyTree] | GradientLog | None,
    buckets: int | None,
) -> Asked:
    """What is asked of `measure` or `plan`, with what is left out; refuses what is wrong."""
    if mesh is None and (workers is None or link is None):
        raise ValueError(
            f"{owner}(workers, link, mesh): must be known by a mesh or by both others, got "
            f"workers={workers}, link={link}, no mesh; pass mesh=mesh, or workers=16, "
            "link=fg.planning.Link('1gbit')."
        )
    groups = _exchange.groups(owner, workers, fast, axis_name, mesh)
    like = _exchange.like_of(owner, params)
    inputs = _exchange.gradients_of(owner, gradients, like)
    if rows is None:
        slow, joined = groups.sizes[0], groups.workers // groups.sizes[0]
        chosen = candidates(like, slow, joined, list(groups.axes)[-1])
    else:
        chosen = check_rows(owner, rows)
    if buckets is None:  # XLA hides nothing on a CPU
        buckets = 1 if jax.default_backend() == "cpu" else 8
    check_count(f"{owner}(buckets)", buckets, "use 1 for no overlap.")
    own = step if callable(step) else _link.seconds(f"{owner}(step)", step)
    known = None if link is None else Link.of(link)
    default = rows is None
    return Asked(owner, like, own, known, groups, mesh, chosen, inputs, buckets, default)


def complete(
    asked: Asked,
    seconds: float,
    tell: Callable[[str], object],
    timings: Mapping[str, Timing] | None = None,
    exact: bool = True,
) -> Measured:
    """All that is not known, measured; large models by a smaller one, unless it is to be exact."""
    groups, mesh, link, step = asked.groups, asked.mesh, asked.link, asked.step
    agree = _timing.agreement(mesh, groups.axis_name)
    if link is None:
        assert mesh is not None
        tell("link")
        link = measure_link(mesh, groups.axis_name if groups.fast is None else groups.slow, seconds)
    if callable(step):
        tell("step")
        step = _time_step(asked.owner, step, seconds, agree)
    if timings is None:
        timings = _time_rows(asked, seconds, tell, agree, exact)
    fast = None if groups.fast is None else (groups.sizes[1], groups.fast)
    return Measured(step, link, groups.workers, timings, fast, groups.axis_name)


def _time_step(owner: str, step: Callable[[], Any], seconds: float, agree: Agree) -> float:
    def run(_: None) -> Any:
        out = step()
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out)):
            raise ValueError(
                f"{owner}(step): must return the arrays to wait for, got {out!r}; end the function "
                "with return."
            )
        return out

    return _timing.timed(run, [None], seconds, agree=agree).seconds


def _time_rows(
    asked: Asked, seconds: float, tell: Callable[[str], object], agree: Agree, exact: bool
) -> dict[str, Timing]:
    """What each candidate takes on this device, by its name."""
    values, like, own = _exchange.count(asked.like), asked.like, asked.gradients
    times = 1.0 if exact else max(1.0, values / LARGEST)
    if times > 1:
        like, own = _exchange.smaller(like, 1 / times), None
    inputs = functools.cache(lambda: own or _exchange.inputs_like(like))
    axes, out = asked.groups.axes, dict[str, Timing]()
    for row in asked.rows:
        tell(row.name)
        tx, apart = row.transformation(_exchange.axis_of(axes)), asked.buckets > 1
        took = _exchange.timing_of(tx, like, axes, inputs, seconds, row.every, agree, apart)
        out[row.name] = took._replace(
            compress=times * took.compress, decompress=times * took.decompress
        )
    return out


TABLE = importlib.resources.files("fftgrad.planning") / "timings.json"
COPY_VALUES = 1 << 22
COPYING = 0.2
"""Seconds in which one copy at least is not disturbed."""
MUONS = (fg.optimizers.feedback_muon, optax.contrib.muon)
ITERATIONS = 5
"""Of an orthogonalization."""
TICK = 1e-7
"""The shortest time that is told from none."""
PASSES = 4
"""Over a gradient, of what groups of workers with fast links do first and last."""


class Point(NamedTuple):
    """What a row took for so many values and workers: seconds."""

    values: int
    workers: int
    compress: float
    decompress: float
    compile: float


@functools.cache
def load_table() -> Mapping[str, Any]:
    """The table: its machine, and the points of each row by its name."""
    found = json.loads(TABLE.read_text())
    found["rows"] = {row["name"]: [Point(*p) for p in row["points"]] for row in found["rows"]}
    return found


def in_table(rows: Sequence[Candidate]) -> bool:
    """Whether all of them are in it."""
    return {row.name for row in rows} <= {*load_table()["rows"]}


def from_table(
    rows: Sequence[Candidate], like: PyTree, groups: Groups, agree: Agree = float
) -> tuple[dict[str, Timing], str]:
    """What the rows would take here, and a sentence that says where that is from."""
    table, here = load_table(), agree(copy_seconds())
    slower = here / table["copy_seconds"]
    found = {row.name: _scaled(_of(row, like, groups), slower, groups.sizes) for row in rows}
    device = jax.local_devices()[0]
    guess = "" if device.platform == "cpu" else f", which for a {device.platform} is a guess"
    said = (
        f"Codec times: measured on {table['machine']}, times {slower:.2g}, as a memory copy takes "
        f"here{guess}. With --measure, or measure=True, they are measured here."
    )
    return found, said


def copy_seconds() -> float:
    """What a copy of some values takes, to where others were: fresh memory takes its own time."""
    if jax.default_backend() == "cpu":  # on one thread: others may have the other processors
        x, into = (np.ones(COPY_VALUES, np.float32) for _ in range(2))
        run = lambda x: np.copyto(into, x)  # noqa: E731
        return _timing.timed(run, [x], COPYING, 5).least
    copy = jax.jit(lambda x: x * 2.0)
    return _timing.timed(copy, [jnp.ones(COPY_VALUES, jnp.float32)], COPYING, 5).least


def orthogonalizing(like: PyTree) -> float:
    """Multiplications and additions of Muon, for all matrices."""
    shapes = (sorted(leaf.shape) for leaf in jax.tree.leaves(like) if len(leaf.shape) == 2)
    return float(sum(ITERATIONS * (4 * a * a * b + 2 * a**3) for a, b in shapes))


def turning(like: PyTree) -> float:
    """Multiplications and additions of an eigenbasis, for all matrices.

    Three pairs of products turn a matrix there, and its mean and what was sent of it back; a pair
    follows the averages, and a tenth of some products of square ones makes new bases.
    """
    shapes = (leaf.shape for leaf in jax.tree.leaves(like) if len(leaf.shape) == 2)
    return float(sum(8 * a * b * (a + b) + (a**3 + b**3) for a, b in shapes))


def _scaled(timing: Timing, by: float, sizes: tuple[int, ...]) -> Timing:
    return Timing(timing.compress * by, timing.decompress * by, sizes, timing.compile)


def _of(row: Candidate, like: PyTree, groups: Groups) -> Timing:
    """On the machine of the table."""
    table, slow = load_table(), groups.sizes[0]
    joined = groups.workers // slow
    values = _exchange.count(like)
    points = table["rows"][row.name]
    most = max(p.workers for p in points)
    line = [p for p in points if p.workers == most]
    compress, decompress = (
        _at([(p.values, getattr(p, part)) for p in line], values // joined)
        for part in ("compress", "decompress")
    )
    if isinstance(_gathered(row), fg.AllGather):  # what others sent is decoded by each worker
        others = (slow - most) * _each_worker(points) * values / joined
        decompress = max(decompress * min(1.0, slow / most), decompress + others)
    if getattr(row.optimizer, "func", row.optimizer) in MUONS:
        rate = table["muon_flops_per_second"] / row.every
        decompress += orthogonalizing(like) / rate
    if isinstance(row.recipe.exchange, fg.Eigenbasis):
        decompress += turning(like) / table["muon_flops_per_second"]
    if joined > 1:
        decompress += PASSES * table["copy_seconds"] * values / COPY_VALUES
    return Timing(compress, decompress, compile=max(p.compile for p in points))


def _gathered(row: Candidate) -> fg.Exchange:
    exchange = row.recipe.exchange
    return exchange.slow if isinstance(exchange, fg.Hierarchical) else exchange


def _each_worker(points: Sequence[Point]) -> float:
    """Seconds that decoding takes for each value and worker."""
    few, many = (p for p in points if [q.values for q in points].count(p.values) == 2)
    return max(0.0, many.decompress - few.decompress) / (many.workers - few.workers) / few.values


def _at(points: Sequence[tuple[int, float]], values: int) -> float:
    """Between two sizes by a power of it; beyond the largest in proportion."""
    sizes, seconds = zip(*points, strict=True)
    if values >= sizes[-1]:
        return seconds[-1] * values / sizes[-1]
    logs = np.log(np.maximum(seconds, TICK))
    return float(np.exp(np.interp(math.log(max(values, 1)), np.log(sizes), logs)))
