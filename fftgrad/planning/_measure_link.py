"""The latency and the bandwidth of the links between the workers of a mesh, by collectives."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad.ops import _collectives
from fftgrad.planning import _together
from fftgrad.tools import _cost, _timing
from fftgrad.tools._link import Link

SIZES = (1 << 13, 1 << 18, 1 << 22, 1 << 25)
"""Bytes of the whole vector that a collective is about."""


class Timed(NamedTuple):
    """What a collective took.

    Attributes:
      kind: of it.
      rounds: how often its latency counts.
      bytes: that left each worker.
      seconds: the median.
    """

    kind: str
    rounds: float
    bytes: float
    seconds: float


def measure_link(mesh: Mesh, axis_name: AxisName = "data", seconds: float = 1.0) -> Link:
    """Function: what messages take between the workers of a mesh, measured.

    An all-reduce, an all-gather and an all-to-all of vectors of 8 KiB to 32 MiB, timed from the
    moment when all workers are ready until the last is done. The largest tell the bandwidth, and
    what share of it each kind of collective gets; the smallest tell the latency. All processes have
    to call it at once, as any collective. Sizes that would take more than four times the given
    seconds are left out, so over a very slow link the bandwidth rests on 256 KiB.

    Args:
      mesh: over real or simulated devices, of one process or of several.
      axis_name: the axis, or axes, whose links are in question.
      seconds: for each collective and size, about.

    Returns:
      A `Link`, on all workers the same, with its `residual`.

    Wire: up to twice 32 MiB over each link, three times or more.

    Raises:
      ValueError: if the mesh has no such axis, or the axis only one worker.

    Example:
      >>> import fftgrad as fg
      >>> import jax
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> fg.measure_link(mesh, "data", seconds=0.1).bandwidth > 0
      True
    """
    _axes.check_mesh("measure_link(axis_name)", mesh, axis_name)
    workers = _axes.mesh_size(mesh, axis_name)
    if workers < 2:
        raise ValueError(
            f"measure_link(mesh): must have two workers at least along {axis_name!r}, got "
            f"{workers}; give the link as Link('1gbit', '100us')."
        )
    found = list[Timed]()
    for size, larger in zip(SIZES, (*SIZES[1:], math.inf), strict=True):
        for kind, collective in COLLECTIVES.items():
            own = size // workers if kind == "all-gather" else size
            took = _time(mesh, axis_name, collective, own, seconds)
            over = own * _collectives.RING[kind](workers)
            found.append(Timed(kind, _cost.rounds(kind, workers), over, took))
        longest = max(timed.seconds for timed in found[-len(COLLECTIVES) :])
        if longest * larger / size > 4 * seconds:  # what the next size would take
            break
    return fit(found)


def fit(found: list[Timed]) -> Link:
    """The link: its bandwidth is what the largest messages get, its latency what the smallest take.

    Not the line nearest to all: links let short messages pass at once that long ones pay for, so
    that the small would raise the bandwidth.
    """
    kinds = dict.fromkeys(timed.kind for timed in found)
    small = {k: min((t for t in found if t.kind == k), key=lambda t: t.bytes) for k in kinds}
    large = {k: max((t for t in found if t.kind == k), key=lambda t: t.bytes) for k in kinds}
    latency, rates = 0.0, dict[str, float]()
    for _ in range(20):
        rates = {
            k: t.bytes / max(t.seconds - t.rounds * latency, t.seconds / 2)
            for k, t in large.items()
        }
        rest = [(t.seconds - t.bytes / rates[k]) / t.rounds for k, t in small.items()]
        latency = max(0.0, statistics.median(rest))
    best = max(rates.values())
    shares = tuple((kind, rate / best) for kind, rate in rates.items() if rate < best)
    link = Link(best, latency, shares)
    errors = [_cost.link_seconds(t.kind, t.rounds, t.bytes, link) / t.seconds - 1 for t in found]
    return dataclasses.replace(link, residual=math.sqrt(statistics.mean(e * e for e in errors)))


def _time(
    mesh: Mesh,
    axis_name: AxisName,
    collective: Callable[[jax.Array, AxisName], jax.Array],
    size: int,
    seconds: float,
) -> float:
    workers = _axes.mesh_size(mesh, axis_name)
    words = -(-size // 4 // workers) * workers

    def run(x: jax.Array) -> jax.Array:
        return collective(x, axis_name).ravel()[:1]

    spec = P(axis_name)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    inputs = [_together.full(mesh, axis_name, words * workers, float(n)) for n in (1, 2)]
    agree = _together.agreement(mesh, axis_name)
    return _timing.timed(jax.jit(mapped), inputs, seconds, agree=agree).seconds


COLLECTIVES: dict[str, Callable[[jax.Array, AxisName], jax.Array]] = {
    "all-reduce": lambda x, axis: lax.psum(x, axis),
    "all-gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "all-to-all": lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True),
}
