"""What a plan rests on, measured: the step, the link, and what each candidate takes here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad.exchanges import _layout
from fftgrad.planning import _exchange, _together
from fftgrad.planning._candidate import Candidate, candidates
from fftgrad.planning._exchange import Timing
from fftgrad.planning._measure_link import measure_link
from fftgrad.tools import _timing, _units
from fftgrad.tools._link import Link
from fftgrad.tools._timing import Agree

AXIS = "data"


class Measured(NamedTuple):
    """What `fg.measure` found; `fg.plan(params, **measured._asdict())` makes a plan of it.

    Attributes:
      step: seconds of a step without any exchange.
      link: of each worker.
      workers: how many there are.
      timings: of each candidate, by its name.
    """

    step: float
    link: Link
    workers: int
    timings: Mapping[str, Timing]


def measure(
    params: PyTree,
    *,
    step: Callable[[], Any] | str | float,
    workers: int | None = None,
    link: Link | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName = AXIS,
    rows: Sequence[Candidate] | None = None,
    gradients: Sequence[PyTree] | None = None,
    buckets: int | None = None,
    seconds: float = 0.5,
    tell: Callable[[str], object] = lambda _: None,
) -> Measured:
    """Function: what a plan rests on, measured on this device and over the links of a mesh.

    An exchange is timed as one of so many equal workers, without the others: its own program with
    each collective replaced by what it would bring if all had sent the same. So one device is
    enough, for any number of workers, and decoding their payloads is in the time. What the links
    take is measured apart, by `fg.measure_link`. In several processes all have to call it at once,
    with the mesh: they then begin together, the slowest of them counts, and they share processors
    as they do in training.

    Args:
      params: the parameters, or their shapes.
      step: a function without arguments that makes one step without exchange and returns what to
        wait for, such as `lambda: grad_step(w, x, y)`; or its seconds, or a text like "300ms".
      workers: how many there will be; those of the mesh, if left out.
      link: the link, if it is known: `fg.Link("1gbit", "100us")`.
      mesh: the mesh whose links are measured, if `link` is left out.
      axis_name: the axis, or axes, of the workers.
      rows: what to time; all that `fg.plan` compares, if left out.
      gradients: trees like `params` to time with; heavy-tailed random values of a fixed seed, if
        left out.
      buckets: as for `fg.plan`. With one nothing hides, and what comes before the first message is
        not timed apart, which halves what there is to compile.
      seconds: the time that the rounds of each candidate and collective take, about. A round of
        each is made in any case, after two that are not counted, of which the first compiles.
      tell: hears the name of each thing before it is timed.

    Returns:
      A `Measured`.

    Wire: what `fg.measure_link` sends, if it measures the link.

    Raises:
      TypeError: if a leaf is not what `compressed_pmean` takes.
      ValueError: if neither `link` nor `mesh` is given, or neither `workers` nor `mesh`.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> rows = [fg.Candidate("dense", fg.AllReduce(), dense=True)]
      >>> link = fg.Link("1gbit", "100us")
      >>> measured = fg.measure(
      ...     jnp.zeros(1000), step="20ms", workers=4, link=link, rows=rows, seconds=0.01
      ... )
      >>> measured.step, list(measured.timings)
      (0.02, ['dense'])
    """
    if (workers is None and mesh is None) or (link is None and mesh is None):
        raise ValueError(
            f"measure(workers, link, mesh): must be known by a mesh or by both others, got "
            f"workers={workers}, link={link}, no mesh; pass mesh=mesh, or workers=16, "
            "link=fg.Link('1gbit')."
        )
    if mesh is not None and workers is None:
        workers = _axes.mesh_size(mesh, axis_name)
    assert workers is not None
    _layout.check_tree("measure", "params", params)
    if link is None and mesh is not None:
        tell("link")
        link = measure_link(mesh, axis_name, seconds)
    assert link is not None
    tell("step")
    agree = _together.agreement(mesh, axis_name)
    own = measured_step(step, seconds, agree)
    chosen = candidates(params, workers) if rows is None else rows
    apart = bucket_count(buckets) > 1
    found = timings(params, chosen, {AXIS: workers}, gradients, seconds, tell, agree, apart)
    return Measured(own, link, workers, found)


def measured_step(
    step: Callable[[], Any] | str | float, seconds: float, agree: Agree = float
) -> float:
    """Seconds of a step, that are given or that it takes."""
    if callable(step):
        return _timing.timed(lambda _: step(), [None], seconds, agree=agree).seconds
    return _units.seconds("step", step)


def timings(
    params: PyTree,
    rows: Sequence[Candidate],
    axes: Mapping[str, int],
    gradients: Sequence[PyTree] | None,
    seconds: float,
    tell: Callable[[str], object] = lambda _: None,
    agree: Agree = float,
    apart: bool = True,
) -> dict[str, Timing]:
    """What each candidate takes on this device, by its name.

    With `apart`, what comes before the first message apart from the rest.
    """
    like = _layout.like(params)
    inputs = list(gradients or _exchange.inputs_like(like))
    out = dict[str, Timing]()
    for row in rows:
        tell(row.name)
        tx = row.transformation(_exchange.axis_of(axes))
        out[row.name] = _exchange.timing_of(
            tx, like, axes, inputs, seconds, row.every, agree, apart
        )
    return out


def bucket_count(buckets: int | None) -> int:
    """In how many buckets the gradient leaves, unless it is said: XLA hides nothing on a CPU."""
    return (1 if jax.default_backend() == "cpu" else 8) if buckets is None else buckets
