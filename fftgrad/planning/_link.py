"""Links between workers: what a step takes over them, and how they are measured.

    step     = backward pass and optimizer, without any exchange
    exchange = Σ over collectives of rounds · α + bytes over the link / β
    seconds  = step + (compress + exchange + decompress) / H

with the latency α and the bandwidth β of a link, and an exchange every H steps. A gradient that
travels in B buckets leaves while the backward pass runs, all but the last of them:

    seconds  = max(step + compress, (B - 1) / B · exchange) + exchange / B + decompress

as Agarwal et al. model dense training (MLSys 2022, arXiv:2103.00543). Seconds and bytes
throughout. RedSync's model (arXiv:1808.04357) is the one with trees, one bucket, and w times the
seconds that one payload takes to decode; that of the FFT paper (HPDC 2020) the one of two workers
without latency, in which compressing and decompressing take as long.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, DecimalException
from typing import Literal, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._values import brief, plain, value
from fftgrad.ops._collectives import RING, Collective
from fftgrad.planning import _timing

SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9", "min": "60"}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
NUMBER = re.compile(
    r"\s*+(-?(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:e[+-]?[0-9]++)?+)\s*+(\S*+)\s*+", re.IGNORECASE
)
BITS = re.compile(r"(?P<prefix>[kmgt]?)(?P<unit>bit)s?(?:/s|ps)?", re.IGNORECASE)
LETTER = re.compile(r"(?P<prefix>[kKMGT]?)(?P<unit>[bB])(?:/s|ps)")
"""As the field writes it: Gb/s is a gigabit a second, GB/s a gigabyte."""
BPS = re.compile(r"(?P<prefix>[kmgt])(?P<unit>b)ps")
"""All in small letters it is bits too: mbps is how links are sold."""
EITHER = re.compile(r"[kmgt]?b(?:/s|ps)?", re.IGNORECASE)
"""Whose case tells nothing: who writes 1gb may mean either, and one is eight times the other."""


@value
class Link:
    """Value: what a message takes between two workers: latency + bytes / bandwidth.

    `fg.planning.measure` finds both for a mesh. Where they are given, the bandwidth is what a
    collective gets: of the line rate of an Ethernet TCP leaves 94 to 96 %, of packets of 9,001
    bytes 99 %, and many connections over a short queue, or a link of 40 Gbit/s and more, leave much
    less (docs/results/others.md).

    Args:
      bandwidth: bytes per second in each direction, or a text: "1gbit", "100 Mbit/s", "25GB/s".
      latency: seconds that a round of a collective takes however short its messages are, or a text:
        "100us", "2ms". gloo takes two to three times the delay of the link.
      shares: what a kind of collective gets of the bandwidth, such as (("all-to-all", 0.6),), where
        that is not all of it.
      residual: the relative error, in the root mean square, with which the two explain what was
        measured; 0 where nothing was.

    Example:
      >>> fg.planning.Link("1gbit", "100us")
      Link(bandwidth=125000000.0, latency=0.0001)
    """

    bandwidth: float
    latency: float
    shares: tuple[tuple[str, float], ...] = ()
    residual: float = dataclasses.field(default=0.0, compare=False)

    def __init__(
        self,
        bandwidth: str | float,
        latency: str | float = "50us",
        shares: tuple[tuple[str, float], ...] = (),
        residual: float = 0.0,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "bandwidth", bytes_per_second("Link(bandwidth)", bandwidth))
        set_field(self, "latency", seconds("Link(latency)", latency))
        set_field(self, "shares", plain(shares, "float"))
        set_field(self, "residual", plain(residual, "float"))

    @classmethod
    def of(cls, link: "Link | str | float") -> "Link":
        """A link, or that of a bandwidth alone."""
        return link if isinstance(link, Link) else cls(link)


def seconds(argument: str, value: str | float) -> float:
    """A time in seconds: a number, or a text such as "300ms", "50us", "1.5s"."""
    remedy = "use '300ms'."
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        unit = match[2].replace("\u03bc", "µ") if match else ""  # Greek mu for the sign of micro
        if not match or unit not in SECONDS:
            raise ValueError(
                f"{argument}: must be seconds, or a text with a unit of {', '.join(SECONDS)}, got "
                f"{brief(value)}; {remedy}"
            )
        try:  # in decimals, so that 100us is 1e-4
            value = float(Decimal(match[1]) * Decimal(SECONDS[unit]))
        except DecimalException:  # beyond what they hold
            value = float(match[1])
    if not 0 <= _number(argument, value, remedy) < float("inf"):
        raise ValueError(f"{argument}: must be finite and not negative, got {value}; {remedy}")
    return float(value)


def bytes_per_second(argument: str, value: str | float) -> float:
    """A rate in bytes per second: a number, or a text such as "1gbit", "100 Mbit/s", "25GB/s"."""
    remedy = "use '1gbit' or '125MB/s'."
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        written = match[2] if match else ""
        unit = BITS.fullmatch(written) or LETTER.fullmatch(written) or BPS.fullmatch(written)
        if not match or not unit:
            unclear = ", which may be bits or bytes" if EITHER.fullmatch(written) else ""
            raise ValueError(
                f"{argument}: must be bytes per second, or a text in bit/s or B/s, got "
                f"{brief(value)}{unclear}; {remedy}"
            )
        factor = 1.0 if unit["unit"] == "B" else 0.125
        value = float(match[1]) * PREFIXES[unit["prefix"].lower()] * factor
    if not 0 < _number(argument, value, remedy) < float("inf"):
        raise ValueError(f"{argument}: must be positive and finite, got {value}; {remedy}")
    return float(value)


def _number(argument: str, given: object, remedy: str) -> float:
    value = plain(given)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{argument}: must be a number or a text, got {type(value).__name__}; {remedy}"
        )
    return value


Algorithm = Literal["fastest", "ring", "tree"]
"""How a collective goes around: rings take a round a worker, trees (halving and doubling) lg w; the
fastest is for each collective the faster of a ring and what libraries use for short messages."""

TREES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "collective-broadcast": 1}
"""How often a tree goes up or down."""

PIPELINED = {"all-reduce": 2.0}
"""How often a byte leaves a worker of a tree that is a pipeline, up and down, as those of NCCL."""


class Parts(NamedTuple):
    """The parts of a step, in seconds.

    Attributes:
      step: backward pass and optimizer.
      compress: until the first message can leave.
      exchange: on the links.
      decompress: decoding, and all else that follows the first message.
    """

    step: float
    compress: float
    exchange: float
    decompress: float


def rounds(kind: str, workers: int, algorithm: Literal["ring", "tree"] = "ring") -> float:
    """How often a collective pays the latency."""
    if algorithm == "tree" and kind in TREES:
        return TREES[kind] * math.log2(workers)
    if kind == "collective-permute":
        return 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (workers - 1)


def collective_seconds(
    kind: str, size: float, workers: int, link: Link, algorithm: Algorithm = "fastest"
) -> float:
    """What a collective takes to which each of so many workers hands `size` bytes.

    In a ring and by halving and doubling as many bytes leave a worker. The fastest is a ring or, of
    a sum, a pipelined tree, in which each byte goes up and down: w/(w - 1) times as many in lg w
    rounds each way; all other collectives double or halve, but all-to-alls.
    """
    if workers == 1:
        return 0.0
    over = size * RING[kind](workers)
    if algorithm != "fastest":
        return link_seconds(kind, rounds(kind, workers, algorithm), over, link)
    most = max(over, size * PIPELINED.get(kind, 0.0))
    return min(
        link_seconds(kind, rounds(kind, workers), over, link),
        link_seconds(kind, rounds(kind, workers, "tree"), most, link),
    )


def link_seconds(kind: str, rounds: float, over: float, link: Link) -> float:
    """What so many rounds take that send `over` bytes over a link in all."""
    return rounds * link.latency + over / (link.bandwidth * dict(link.shares).get(kind, 1.0))


def exchange_seconds(
    collectives: Iterable[Collective],
    links: Link | Mapping[str, Link],
    algorithm: Algorithm = "fastest",
) -> float:
    """What collectives take one after the other.

    With a link for each axis, the slowest of its axes holds up a collective along several.
    """

    def seconds(c: Collective) -> float:
        along = [links] if isinstance(links, Link) else [links[axis] for axis in c.axes or ()]
        each = (collective_seconds(c.kind, c.bytes, c.workers or 1, x, algorithm) for x in along)
        return max(each)

    return sum(map(seconds, collectives))


def step_seconds(parts: Parts, *, every: int = 1, buckets: int = 1) -> float:
    """What a step takes, of which one of H = `every` exchanges, in B = `buckets`.

    Where there are local steps, nothing hides.
    """
    step, compress, exchange, decompress = parts
    if every > 1:
        return step + (compress + exchange + decompress) / every
    hidden = exchange * (buckets - 1) / buckets
    return max(step + compress, hidden) + exchange / buckets + decompress


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
        # Noise may hide what the bytes take; a hundredth of the whole is as little as shows.
        more = max(large.seconds - small.seconds, large.seconds / 100)
        rates[kind] = (large.bytes - small.bytes) / more
        rest.append((small.seconds - small.bytes / rates[kind]) / small.rounds)
    latency = max(0.0, statistics.median(rest))
    best = max(rates.values())
    shares = tuple((kind, rate / best) for kind, rate in rates.items() if rate < best)
    link = Link(best, latency, shares)
    errors = [link_seconds(t.kind, t.rounds, t.bytes, link) / t.seconds - 1 for t in found]
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
