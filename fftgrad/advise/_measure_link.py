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
from fftgrad.advise import _cost, _timing
from fftgrad.advise._link import Link
from fftgrad.ops import _collectives

SIZES = (1 << 13, 1 << 18, 1 << 22, 1 << 25)
"""Bytes of the whole vector that a collective is about."""


class Sent(NamedTuple):
    """What a collective took."""

    kind: str  # of it
    rounds: float  # how often its latency counts
    bytes: float  # that left each worker
    seconds: float  # the median


def measure_link(mesh: Mesh, axis_name: AxisName = "data", seconds: float = 1.0) -> Link:
    """Function: what messages take between the workers of a mesh, measured.

    An all-reduce, an all-gather and an all-to-all of vectors of 8 KiB to 32 MiB, timed from the
    moment when all workers are ready until the last is done. What the largest take more than the
    smallest tells the bandwidth, and what share of it each kind of collective gets; what is left of
    the smallest is latency. All processes have to call it at once, as any collective. Two sizes are
    timed in any case. Others are left out if their bytes would take more than four times the given
    seconds, and than four times the size before, so over a very slow link the bandwidth rests on
    256 KiB.

    Args:
      mesh: over real or simulated devices, of one process or of several.
      axis_name: the axis, or axes, whose links are in question.
      seconds: for each collective and size, about.

    Returns:
      A `Link`, on all workers the same, with its `residual`. Its latency is that of a round of a
      ring: on CPUs, whose library knows nothing else, plan with `algorithm="ring"`.

    Wire: up to twice 32 MiB over each link, three times or more.

    Example:
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> fg.advise.measure_link(mesh, "data", seconds=0.1).bandwidth > 0
      True
    """
    _axes.check_mesh("measure_link(axis_name)", mesh, axis_name)
    workers = _axes.mesh_size(mesh, axis_name)
    if workers < 2:
        raise ValueError(
            f"measure_link(mesh): must have two workers at least along {axis_name!r}, got "
            f"{workers}; give the link as Link('1gbit', '100us')."
        )
    found, longest = list[Sent](), dict[int, float]()
    for size in SIZES:
        if len(longest) > 1 and _is_long(longest, size, seconds):
            break
        for kind, collective in COLLECTIVES.items():
            own = size // workers if kind == "all-gather" else size
            took = _time(mesh, axis_name, collective, own, seconds)
            over = own * _collectives.RING[kind](workers)
            found.append(Sent(kind, _cost.rounds(kind, workers), over, took))
        longest[size] = max(sent.seconds for sent in found[-len(COLLECTIVES) :])
    return fit(found)


def _is_long(longest: dict[int, float], size: int, seconds: float) -> bool:
    """Whether a size takes too much more than the last: its bytes do, for latency does not grow.

    Where latency alone takes longer than the seconds, it is what there is to compare with.
    """
    (small, before), (large, last) = list(longest.items())[-2:]
    return (last - before) / (large - small) * (size - large) > 4 * max(seconds, last)


def fit(found: list[Sent]) -> Link:
    """The link: its bandwidth by what the largest messages take more than the smallest.

    Not by the line nearest to all: links let short messages pass at once that long ones pay for, so
    that the small would raise the bandwidth. Its latency is what is left of the smallest.
    """
    rates, rest = dict[str, float](), list[float]()
    for kind in dict.fromkeys(sent.kind for sent in found):
        own = sorted((t for t in found if t.kind == kind), key=lambda t: t.bytes)
        small, large = own[0], own[-1]
        if small.bytes == large.bytes:
            raise ValueError(
                f"fit(found): must have two sizes of each kind, got one of {kind}; one alone does "
                "not tell latency from bandwidth."
            )
        # Noise may hide what the bytes take; a hundredth of the whole is as little as shows.
        more = max(large.seconds - small.seconds, large.seconds / 100)
        rates[kind] = (large.bytes - small.bytes) / more
        rest.append((small.seconds - small.bytes / rates[kind]) / small.rounds)
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
    inputs = [_timing.full(mesh, axis_name, words * workers, float(n)) for n in (1, 2)]
    agree = _timing.agreement(mesh, axis_name)
    return _timing.timed(jax.jit(mapped), inputs, seconds, agree=agree).seconds


COLLECTIVES: dict[str, Callable[[jax.Array, AxisName], jax.Array]] = {
    "all-reduce": lambda x, axis: lax.psum(x, axis),
    "all-gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "all-to-all": lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True),
}
