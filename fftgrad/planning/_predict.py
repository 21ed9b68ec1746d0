"""Model of the seconds of a step over links, and the traffic of an exchange.

    step     = backward pass and optimizer, without any exchange
    muon     = Muon's matrix products, if Muon replaces the optimizer
    exchange = Σ over collectives of rounds · α + bytes over the link / β
    seconds  = step + muon + (compress + exchange + decompress) / H

with the latency α and the bandwidth β of a link, and an exchange every H steps. If a gradient has
B buckets, the exchange of all but the last bucket overlaps the backward pass:

    seconds  = max(step + compress, (B - 1) / B · exchange) + exchange / B + decompress + muon

as Agarwal et al. model dense training (MLSys 2022, arXiv:2103.00543). The models of RedSync
(arXiv:1808.04357) and of the FFT paper (HPDC 2020) are special cases.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax

import fftgrad as fg
from fftgrad._contracts import AxisName, Comm, PyTree
from fftgrad._values import check, check_count, plain, value
from fftgrad.exchanges import _shards
from fftgrad.ops import _collectives
from fftgrad.ops._collectives import RING, Collective
from fftgrad.planning import _text

Algorithm = Literal["fastest", "ring", "tree"]
"""Algorithm of collectives. An all-gather of w workers takes w - 1 rounds in a ring, log2 w in a
tree. "fastest" is the faster of the two for each collective."""


@value
class Link:
    """Value: the link of a worker. A message takes latency + bytes / bandwidth.

    `fg.planning.measure_link` measures both for a mesh. If you set them yourself, use the bandwidth
    that a collective reaches. TCP reaches 94 to 96 % of the line rate of Ethernet, 99 % with
    packets of 9,001 bytes. Many connections through a switch with a short queue reach much less,
    and so does one connection over 40 Gbit/s and more (docs/results/others.md).

    Args:
      bandwidth: bytes per second in each direction, or a text: "1gbit", "100 Mbit/s", "25GB/s".
      latency: seconds that a short message takes in a collective, or a text: "100us", "2ms". With
        gloo it is two to three times the one-way delay of the link.
      shares: kinds of collectives that reach only a share of `bandwidth`: (("all-to-all", 0.6),).

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
        set_field(self, "bandwidth", _text.bytes_per_second("Link(bandwidth)", bandwidth))
        set_field(self, "latency", _text.seconds("Link(latency)", latency))
        set_field(self, "shares", plain(shares, "float"))

    @classmethod
    def of(cls, link: "Link | str | float") -> "Link":
        """Return a link as it is; for a bandwidth, a link with the default latency."""
        return link if isinstance(link, Link) else cls(link)


TREES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "collective-broadcast": 1}
"""Passes up or down the tree per collective."""


def rounds(kind: str, workers: int, algorithm: Literal["ring", "tree"] = "ring") -> float:
    """Return the number of rounds of a collective; each round takes the latency once."""
    if algorithm == "tree" and kind in TREES:
        return TREES[kind] * math.log2(workers)
    if kind == "collective-permute":
        return 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (workers - 1)


class Parts(NamedTuple):
    """The parts of a step, in seconds."""

    step: float  # backward pass and optimizer
    compress: float  # until the first message can be sent
    exchange: float  # on the links
    decompress: float  # decoding, and all other work after the first message
    muon: float = 0.0  # Muon's matrix products; 0 if `decompress` includes them


def collective_seconds(
    kind: str, size: float, workers: int, link: Link, algorithm: Algorithm = "fastest"
) -> float:
    """Return the seconds of a collective to which each worker passes `size` bytes.

    A tree sends as many bytes as a ring, except for an all-reduce: w/(w - 1) times as many if the
    tree is pipelined. An all-to-all has no tree.
    """
    if workers == 1:
        return 0.0

    def seconds(algorithm: Literal["ring", "tree"], over: float) -> float:
        rate = link.bandwidth * dict(link.shares).get(kind, 1.0)
        return rounds(kind, workers, algorithm) * link.latency + over / rate

    over = size * RING[kind](workers)
    if algorithm != "fastest":
        return seconds(algorithm, over)
    # In a pipelined tree, as in NCCL, a byte leaves a worker once up and once down.
    return min(seconds("ring", over), seconds("tree", 2 * size if kind == "all-reduce" else over))


def exchange_seconds(
    collectives: Iterable[Collective], links: Mapping[str, Link], algorithm: Algorithm = "fastest"
) -> float:
    """Return the seconds of collectives in sequence. Each takes the time of its slowest axis."""

    def seconds(c: Collective) -> float:
        along = (links[axis] for axis in c.axes or ())
        return max(collective_seconds(c.kind, c.bytes, c.workers or 1, x, algorithm) for x in along)

    return sum(map(seconds, collectives))


def step_seconds(parts: Parts, *, every: int = 1, buckets: int = 1) -> float:
    """Return the mean seconds of a step, with an exchange of `buckets` buckets every `every` steps.

    With local steps, nothing overlaps.
    """
    step, compress, exchange, decompress, muon = parts
    if every > 1:
        return step + muon + (compress + exchange + decompress) / every
    hidden = exchange * (buckets - 1) / buckets
    return max(step + compress, hidden) + exchange / buckets + decompress + muon


def traffic(
    argument: str, tx: Any, like: PyTree, axes: Mapping[str, int], every: int = 1
) -> tuple[Collective, ...]:
    """Return the collectives of a transformation in `every` steps; errors name the `argument`.

    Collectives inside a conditional run in one of these steps, all others in each step.
    """
    state = jax.eval_shape(tx.init, like)
    found = _collectives.collectives(tx.update, axes, like, state, like)
    once, got = not any(c.repeated for c in found), "a collective in one"
    check(once, argument, "send outside of loops", got, "unroll it, because a trace has one turn.")
    # One sending branch runs once in `every` steps. With several, the traffic changes by step.
    same = len({c.branch for c in found if c.branch}) <= (every > 1)
    remedy = "say every=4 of 4 local steps, or plan the parts of a schedule one by one."
    check(same, argument, "send the same in every step", "an exchange that changes by step", remedy)
    always = tuple(c for c in found if not c.branch)
    return always * every + tuple(c for c in found if c.branch)


def sent_by(
    exchange: fg.exchanges.Exchange, like: PyTree, axes: Mapping[str, int]
) -> tuple[Collective, ...]:
    """Return the collectives of an exchange for one bucket, along the first axis.

    A trace of `Budget` takes a second, so `wire_bytes` replaces the trace where possible.
    """
    axis, *_ = axes

    def sent(kind: str, size: int, axis: str = axis) -> Collective:
        return Collective(kind, "u32", (size // 4,), size, (), False, axes[axis], (axis,))

    if isinstance(exchange, fg.Hierarchical):
        pieces = _shards.shard_likes(like, exchange.workers)
        own = 4 * (count(pieces) + 1)  # with a word for a NaN, or for the overflow
        slow, fast = sent_by(exchange.slow, pieces, axes), str(exchange.fast_axis)
        there = sent("all-to-all", exchange.workers * own, fast)
        return there, *slow, sent("all-gather", own, fast)
    match exchange:
        case fg.AllGather():
            return (sent("all-gather", exchange.wire_bytes(like)),)
        case fg.TwoStage():
            own = exchange.wire_bytes(like) // (exchange.workers + 1)
            return sent("all-to-all", own * exchange.workers), sent("all-gather", own)
        case fg.Eigenbasis():
            return sent_by(exchange.exchange, like, axes)
        case _:
            mean = lambda x: exchange.mean(x, exchange.init(x), Comm.of(axis, 0)).mean  # noqa: E731
            return _collectives.collectives(mean, axes, like)


def count(params: PyTree) -> int:
    """Count the values of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class Groups(NamedTuple):
    """The workers of a plan: groups over slow links, each of workers with fast links."""

    slow: int  # number of groups
    fast: int = 1  # number of workers in a group
    link: Link | None = None  # of the fast axis, if there is one

    @property
    def axes(self) -> dict[str, int]:
        """Number of workers along each axis, the slow one first."""
        return {"slow": self.slow, "fast": self.fast} if self.link else {"data": self.slow}

    @property
    def axis(self) -> AxisName:
        """The name of the only axis, or the names of both."""
        return ("slow", "fast") if self.link else "data"

    def links(self, slow: Link) -> dict[str, Link]:
        """The link of each axis."""
        return {"slow": slow, "fast": self.link} if self.link else {"data": slow}


def groups(workers: int, fast: tuple[int, Link] | None) -> Groups:
    """Check the workers of a plan and group them."""
    workers = check_count("plan(workers)", workers, "one exchanges nothing.", least=2)
    if fast is None:
        return Groups(workers)
    joined, link = fast
    rule = f"be a divisor of the {workers} workers that leaves two groups at least"
    fine = workers % joined == 0 and 1 < joined < workers
    check(fine, "plan(fast)", rule, joined, "leave it out where no links are fast.")
    return Groups(workers // joined, joined, Link.of(link))
