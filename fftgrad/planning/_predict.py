"""Seconds of a step over links: the model, the codec time of an exchange, and its traffic.

    step     = backward pass and optimizer, without any exchange
    muon     = Muon's matrix products, of a row that has Muon in place of the optimizer
    exchange = Σ over collectives of rounds · α + bytes over the link / β
    seconds  = step + muon + (compress + exchange + decompress) / H

with the latency α and the bandwidth β of a link, and an exchange every H steps. A gradient that
travels in B buckets leaves while the backward pass runs, all but the last of them:

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
"""Algorithm of collectives. A ring takes a round for each worker, a tree lg w. "fastest" is the
faster of a ring and the algorithm that libraries use for short messages."""


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
        set_field(self, "bandwidth", _text.bytes_per_second("Link(bandwidth)", bandwidth))
        set_field(self, "latency", _text.seconds("Link(latency)", latency))
        set_field(self, "shares", plain(shares, "float"))

    @classmethod
    def of(cls, link: "Link | str | float") -> "Link":
        """The link itself, or one with this bandwidth and the default latency."""
        return link if isinstance(link, Link) else cls(link)


TREES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "collective-broadcast": 1}
"""How often a tree goes up or down."""


def rounds(kind: str, workers: int, algorithm: Literal["ring", "tree"] = "ring") -> float:
    """Number of rounds of a collective, each of which takes the latency."""
    if algorithm == "tree" and kind in TREES:
        return TREES[kind] * math.log2(workers)
    if kind == "collective-permute":
        return 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (workers - 1)


class Parts(NamedTuple):
    """The parts of a step, in seconds."""

    step: float  # backward pass and optimizer
    compress: float  # until the first message can leave
    exchange: float  # on the links
    decompress: float  # decoding, and all else that follows the first message
    muon: float = 0.0  # Muon's matrix products, if they are known apart


def collective_seconds(
    kind: str, size: float, workers: int, link: Link, algorithm: Algorithm = "fastest"
) -> float:
    """Seconds of a collective to which each worker passes `size` bytes.

    A ring sends as many bytes as halving and doubling, a pipelined tree of an all-reduce w/(w - 1)
    times as many. An all-to-all has no tree.
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
    """Seconds of collectives one after the other, each as long as along the slowest of its axes."""

    def seconds(c: Collective) -> float:
        along = (links[axis] for axis in c.axes or ())
        return max(collective_seconds(c.kind, c.bytes, c.workers or 1, x, algorithm) for x in along)

    return sum(map(seconds, collectives))


def step_seconds(parts: Parts, *, every: int = 1, buckets: int = 1) -> float:
    """Seconds of a step, with an exchange of `buckets` messages every `every` steps.

    The exchange of local steps overlaps nothing.
    """
    step, compress, exchange, decompress, muon = parts
    if every > 1:
        return step + muon + (compress + exchange + decompress) / every
    hidden = exchange * (buckets - 1) / buckets
    return max(step + compress, hidden) + exchange / buckets + decompress + muon


def traffic(
    argument: str, tx: Any, like: PyTree, axes: Mapping[str, int], every: int = 1
) -> tuple[Collective, ...]:
    """The collectives of a transformation in so many steps; errors name the `argument`.

    Collectives under a condition run in one of the steps, all others in each.
    """
    state = jax.eval_shape(tx.init, like)
    found = _collectives.collectives(tx.update, axes, like, state, like)
    once, got = not any(c.repeated for c in found), "a collective in one"
    check(once, argument, "send outside of loops", got, "unroll it, because a trace has one turn.")
    # Of one conditional, one branch sends. Of several, only some of them do in a step.
    same = len({c.branch for c in found if c.branch}) <= (every > 1)
    remedy = "say every=4 of 4 local steps, or plan the parts of a schedule one by one."
    check(same, argument, "send the same in every step", "an exchange that changes by step", remedy)
    always = tuple(c for c in found if not c.branch)
    return always * every + tuple(c for c in found if c.branch)


def sent_by(exchange: fg.Exchange, like: PyTree, axes: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives of an exchange for one bucket, along the first axis.

    A trace of `Budget` takes a second, so what follows from `wire_bytes` is not traced.
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
    """Number of values."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class Groups(NamedTuple):
    """The workers of a plan: groups along slow links, and the workers that fast links join."""

    slow: int
    fast: int = 1
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
    """Check the workers of a plan, and group them."""
    workers = check_count("plan(workers)", workers, "one exchanges nothing.", least=2)
    if fast is None:
        return Groups(workers)
    joined, link = fast
    rule = f"be a divisor of the {workers} workers that leaves two groups at least"
    fine = workers % joined == 0 and 1 < joined < workers
    check(fine, "plan(fast)", rule, joined, "leave it out where no links are fast.")
    return Groups(workers // joined, joined, Link.of(link))
