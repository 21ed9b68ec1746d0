"""What a plan rests on, measured: the step, the link, and what each candidate takes here."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_count
from fftgrad.advise import _exchange, _inputs, _link, _timing
from fftgrad.advise._candidate import Candidate, candidates, check_rows
from fftgrad.advise._exchange import Timing
from fftgrad.advise._gradients import GradientLog
from fftgrad.advise._inputs import Groups
from fftgrad.advise._link import Link
from fftgrad.advise._measure_link import measure_link
from fftgrad.advise._timing import Agree

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

    The arguments are those of `fg.advise.plan`. `rows` may be empty, where only the step or the
    link is of interest.

    An exchange is timed as one of so many equal workers, without the others: its own program with
    each collective replaced by what it would bring if all had sent the same. So one device is
    enough, for any number of workers, and decoding their payloads is in the time. What the links
    take is measured apart, by `fg.advise.measure_link`. In several processes all have to call it
    at once, with the mesh: they then begin together, the slowest of them counts, and they share
    processors as they do in training.

    Returns:
      A `Measured`.

    Wire: what `fg.advise.measure_link` sends, if it measures the link.

    Example:
      >>> rows = [fg.advise.Candidate("dense", fg.AllReduce(), dense=True)]
      >>> link = fg.advise.Link("1gbit", "100us")
      >>> measured = fg.advise.measure(
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
            "link=fg.advise.Link('1gbit')."
        )
    groups = _inputs.groups(owner, workers, fast, axis_name, mesh)
    like = _inputs.like_of(owner, params)
    inputs = _inputs.gradients_of(owner, gradients, like)
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
    values, like, own = _inputs.count(asked.like), asked.like, asked.gradients
    times = 1.0 if exact else max(1.0, values / LARGEST)
    if times > 1:
        like, own = _inputs.smaller(like, 1 / times), None
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
