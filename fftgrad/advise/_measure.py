"""What a plan rests on, measured: the step, the link, and what each candidate takes here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad.advise import _exchange, _inputs, _timing, _together, _units
from fftgrad.advise._candidate import Candidate, candidates, check_rows
from fftgrad.advise._exchange import Timing
from fftgrad.advise._gradient_log import GradientLog
from fftgrad.advise._inputs import Fast, Groups
from fftgrad.advise._link import Link
from fftgrad.advise._measure_link import measure_link
from fftgrad.advise._timing import Agree


class Measured(NamedTuple):
    """What `measure` found; `plan(params, **measured._asdict())` makes a plan of it.

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
    fast: Fast | None = None
    axis_name: AxisName | None = None


def measure(
    params: PyTree,
    *,
    step: Callable[[], Any] | str | float,
    workers: int | None = None,
    link: Link | str | float | None = None,
    fast: Fast | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    rows: Sequence[Candidate] | None = None,
    gradients: Sequence[PyTree] | GradientLog | None = None,
    buckets: int | None = None,
    seconds: float = 0.5,
    tell: Callable[[str], object] = lambda _: None,
) -> Measured:
    """Function: what a plan rests on, measured on this device and over the links of a mesh.

    An exchange is timed as one of so many equal workers, without the others: its own program with
    each collective replaced by what it would bring if all had sent the same. So one device is
    enough, for any number of workers, and decoding their payloads is in the time. What the links
    take is measured apart, by `fg.advise.measure_link`. In several processes all have to call it
    at once, with the mesh: they then begin together, the slowest of them counts, and they share
    processors as they do in training.

    Args:
      params: the parameters, or their shapes.
      step: a function without arguments that makes one step without exchange and returns what to
        wait for, such as `lambda: grad_step(w, x, y)`; or its seconds, or a text like "300ms".
      workers: how many there will be; those of the mesh, if left out.
      link: the link, if it is known: `fg.advise.Link("1gbit", "100us")`, or its bandwidth alone.
      fast: as for `fg.advise.plan`, where groups of workers have fast links, which are given and
        not measured.
      mesh: the mesh whose links are measured, if `link` is left out; with `fast`, the slow ones.
      axis_name: as for `fg.advise.plan`.
      rows: what to time; all that `fg.advise.plan` compares, if left out.
      gradients: trees like `params` to time with, or what `fg.advise.load_gradients` returned;
        heavy-tailed random values of a fixed seed, if left out.
      buckets: as for `fg.advise.plan`. With one nothing hides, and what comes before the first
        message is not timed apart, which halves what there is to compile.
      seconds: the time that the rounds of each candidate and collective take, about. A round of
        each is made in any case, after two that are not counted, of which the first compiles.
      tell: hears the name of each thing before it is timed.

    Returns:
      A `Measured`.

    Wire: what `fg.advise.measure_link` sends, if it measures the link.

    Raises:
      TypeError: if a leaf is not what `compressed_pmean` takes.
      ValueError: if neither `link` nor `mesh` is given, or neither `workers` nor `mesh`; if there
        is one worker, the mesh lacks an axis, `step` returns no array, or gradients are not like
        `params`, are zeros or not finite.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> rows = [fg.advise.Candidate("dense", fg.AllReduce(), dense=True)]
      >>> link = fg.advise.Link("1gbit", "100us")
      >>> measured = fg.advise.measure(
      ...     jnp.zeros(1000), step="20ms", workers=4, link=link, rows=rows, seconds=0.01
      ... )
      >>> measured.step, list(measured.timings)
      (0.02, ['dense'])
    """
    if (workers is None and mesh is None) or (link is None and mesh is None):
        raise ValueError(
            f"measure(workers, link, mesh): must be known by a mesh or by both others, got "
            f"workers={workers}, link={link}, no mesh; pass mesh=mesh, or workers=16, "
            "link=fg.advise.Link('1gbit')."
        )
    groups = _inputs.groups("measure", workers, fast, axis_name, mesh)
    like = _inputs.like_of("measure", params)
    inputs = _inputs.gradients_of("measure", gradients, like)
    chosen = chosen_rows("measure", rows, like, groups)
    apart = bucket_count("measure", buckets) > 1
    own = step if callable(step) else _units.seconds("measure(step)", step)
    link = None if link is None else _inputs.link_of(link)
    if link is None:
        assert mesh is not None
        tell("link")
        slow = groups.axis_name if groups.fast is None else groups.slow
        link = measure_link(mesh, slow, seconds)
    tell("step")
    agree = _together.agreement(mesh, groups.axis_name)
    own = measured_step(own, seconds, agree) if callable(own) else own
    found = timings(like, chosen, groups.axes, inputs, seconds, tell, agree, apart)
    level = None if groups.fast is None else (groups.sizes[1], groups.fast)
    return Measured(own, link, groups.workers, found, level, groups.axis_name)


def measured_step(step: Callable[[], Any], seconds: float, agree: Agree = float) -> float:
    """Seconds that a step takes."""

    def run(_: None) -> Any:
        out = step()
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out)):
            raise ValueError(
                f"measure(step): must return the arrays to wait for, got {out!r}; end the function "
                "with return."
            )
        return out

    return _timing.timed(run, [None], seconds, agree=agree).seconds


def chosen_rows(
    owner: str, rows: Sequence[Candidate] | None, like: PyTree, groups: Groups
) -> tuple[Candidate, ...]:
    """What is given, or all that a plan compares."""
    if rows is not None:
        return check_rows(owner, rows)
    slow, joined = groups.sizes[0], groups.workers // groups.sizes[0]
    return candidates(like, slow, joined, list(groups.axes)[-1])


def timings(
    like: PyTree,
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
    inputs = gradients or _exchange.inputs_like(like)
    out = dict[str, Timing]()
    for row in rows:
        tell(row.name)
        tx = row.transformation(_exchange.axis_of(axes))
        out[row.name] = _exchange.timing_of(
            tx, like, axes, inputs, seconds, row.every, agree, apart
        )
    return out


def bucket_count(owner: str, buckets: int | None) -> int:
    """In how many buckets the gradient leaves, unless it is said: XLA hides nothing on a CPU."""
    if buckets is None:
        return 1 if jax.default_backend() == "cpu" else 8
    _inputs.check_count(f"{owner}(buckets)", buckets, "use 1 for no overlap.")
    return buckets
