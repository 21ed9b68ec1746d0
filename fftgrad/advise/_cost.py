"""What a step takes: a model of computing, of collectives, and of what hides behind what.

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

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from fftgrad._values import check_choice
from fftgrad.advise._link import Link
from fftgrad.ops._collectives import RING, Collective

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
    check_choice("collective_seconds(algorithm)", algorithm, get_args(Algorithm))
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
