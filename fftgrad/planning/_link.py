"""Links between workers: their latency and bandwidth, given or measured."""

import math
import re
import statistics
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._values import brief, plain, value
from fftgrad.ops._collectives import RING
from fftgrad.planning import _timing

TIME = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(s|ms|us|µs|ns)\s*")
EXPONENTS = {"s": "", "ms": "e-3", "us": "e-6", "µs": "e-6", "ns": "e-9"}
RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?)((?i:bits?)|[bB](?=/s|ps))(?:/s|ps)?\s*")
"""As the field writes it: Gb/s is a gigabit a second, GB/s a gigabyte. 1gb may mean either."""
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@value
class Link:
    """Value: the link of a worker. A message takes latency + bytes / bandwidth.

    `fg.planning.measure_link` measures both for a mesh. If you give them, give the bandwidth that a
    collective gets. TCP gets 94 to 96 % of the line rate of an Ethernet, 99 % with packets of 9,001
    bytes. Many connections over a short queue, and links of 40 Gbit/s and more, get much less
    (docs/results/others.md).

    Args:
      bandwidth: bytes per second in each direction, or a text: "1gbit", "100 Mbit/s", "25GB/s".
      latency: seconds of a round of a collective with short messages, or a text: "100us", "2ms".
        gloo takes two to three times the delay of the link.
      shares: kinds of collectives that get a part of the bandwidth: (("all-to-all", 0.6),).

    Example:
      >>> fg.planning.Link("1gbit", "100us")
      Link(bandwidth=125000000.0, latency=0.0001)
    """

    bandwidth: float
    latency: float
    shares: tuple[tuple[str, float], ...] = ()

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "50us",
        shares: tuple[tuple[str, float], ...] = (),
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "bandwidth", bytes_per_second("Link(bandwidth)", bandwidth))
        set_field(self, "latency", seconds("Link(latency)", latency))
        set_field(self, "shares", plain(shares, "float"))

    @classmethod
    def of(cls, link: "Link | str | float") -> "Link":
        """The link itself, or one with this bandwidth and the default latency."""
        return link if isinstance(link, Link) else cls(link)


def seconds(argument: str, value: str | float) -> float:
    """Read a time in seconds: a number, or a text such as "300ms", "50us", "1.5s"."""
    remedy = "use '300ms'."
    if isinstance(value, str):
        if not (found := TIME.fullmatch(value)):
            raise ValueError(
                f"{argument}: must be seconds, or a text with a unit of {', '.join(EXPONENTS)}, "
                f"got {brief(value)}; {remedy}"
            )
        value = float(found[1] + EXPONENTS[found[2]])  # so that 100us is 1e-4 to the last bit
    if not 0 <= _number(argument, value, remedy) < math.inf:
        raise ValueError(f"{argument}: must be finite and not negative, got {value}; {remedy}")
    return float(value)


def bytes_per_second(argument: str, value: str | float) -> float:
    """Read bytes per second: a number, or a text such as "1gbit", "100 Mbit/s", "25GB/s"."""
    remedy = "use '1gbit' or '125MB/s'."
    if isinstance(value, str):
        if not (found := RATE.fullmatch(value)):
            raise ValueError(
                f"{argument}: must be bytes per second, or a text in bit/s or B/s, got "
                f"{brief(value)}; {remedy}"
            )
        value = float(found[1]) * PREFIXES[found[2].lower()] * (1.0 if found[3] == "B" else 0.125)
    if not 0 < _number(argument, value, remedy) < math.inf:
        raise ValueError(f"{argument}: must be positive and finite, got {value}; {remedy}")
    return float(value)


def _number(argument: str, given: object, remedy: str) -> float:
    value = plain(given)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{argument}: must be a number or a text, got {type(value).__name__}; {remedy}"
        )
    return value


TREES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "collective-broadcast": 1}
"""How often a tree goes up or down."""


def rounds(kind: str, workers: int, algorithm: Literal["ring", "tree"] = "ring") -> float:
    """Number of rounds of a collective, each of which takes the latency."""
    if algorithm == "tree" and kind in TREES:
        return TREES[kind] * math.log2(workers)
    if kind == "collective-permute":
        return 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (workers - 1)


def link_seconds(kind: str, rounds: float, over: float, link: Link) -> float:
    """Seconds of so many rounds that send `over` bytes over a link in all."""
    return rounds * link.latency + over / (link.bandwidth * dict(link.shares).get(kind, 1.0))


SIZES = (1 << 13, 1 << 18, 1 << 22, 1 << 25)
"""Bytes of the whole vector of a collective."""
COLLECTIVES: dict[str, Callable[[jax.Array, AxisName], jax.Array]] = {
    "all-reduce": lambda x, axis: lax.psum(x, axis),
    "all-gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "all-to-all": lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True),
}


class Sent(NamedTuple):
    """A timed collective."""

    kind: str
    rounds: float
    bytes: float  # that left each worker
    seconds: float  # the median


def measure_link(mesh: Mesh, axis_name: AxisName = "data", seconds: float = 1.0) -> Link:
    """Function: measure the latency and the bandwidth between the workers of a mesh.

    It times an all-reduce, an all-gather and an all-to-all of vectors of 8 KiB to 32 MiB, from the
    moment when all workers are ready until the last is done. The difference between the largest and
    the smallest gives the bandwidth of each kind; the rest of the smallest is latency. All
    processes have to call it at once, as any collective. Two sizes are always timed. A larger one
    is left out if its bytes would take more than four times `seconds` and more than four times the
    size before, so over a very slow link the bandwidth rests on 256 KiB.

    Args:
      mesh: over real or simulated devices, of one process or of several.
      axis_name: the axis, or axes, whose links are measured.
      seconds: to spend on each collective and size, about.

    Returns:
      A `Link`, the same on all workers. Its latency is that of a round of a ring. On CPUs, whose
      library has only rings, plan with `algorithm="ring"`.

    Wire: up to twice 32 MiB over each link, three times or more.

    Example:
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> fg.planning.measure_link(mesh, "data", seconds=0.1).bandwidth > 0
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
            over = own * RING[kind](workers)
            found.append(Sent(kind, rounds(kind, workers), over, took))
        longest[size] = max(sent.seconds for sent in found[-len(COLLECTIVES) :])
    return fit(found)


def _is_long(longest: dict[int, float], size: int, seconds: float) -> bool:
    """True if the bytes of a size take too long; its latency is that of the size before.

    If latency alone takes longer than `seconds`, the limit is four times the size before.
    """
    (small, before), (large, last) = list(longest.items())[-2:]
    return (last - before) / (large - small) * (size - large) > 4 * max(seconds, last)


def fit(found: list[Sent]) -> Link:
    """Fit a link: the bandwidth from the largest and smallest messages, the latency from the rest.

    A regression over all sizes would overestimate the bandwidth, because links let short messages
    pass at once.
    """
    rates, rest = dict[str, float](), list[float]()
    for kind in dict.fromkeys(sent.kind for sent in found):
        own = sorted((t for t in found if t.kind == kind), key=lambda t: t.bytes)
        small, large = own[0], own[-1]
        # Noise may hide the time of the bytes; less than a hundredth of the whole cannot be seen.
        more = max(large.seconds - small.seconds, large.seconds / 100)
        rates[kind] = (large.bytes - small.bytes) / more
        rest.append((small.seconds - small.bytes / rates[kind]) / small.rounds)
    best = max(rates.values())
    shares = tuple((kind, rate / best) for kind, rate in rates.items() if rate < best)
    return Link(best, max(0.0, statistics.median(rest)), shares)


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
