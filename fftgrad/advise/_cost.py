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
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from fftgrad.advise._link import Link
from fftgrad.ops._collectives import RING, Collective

Algorithm = Literal["fastest", "ring", "tree"]
"""How a collective goes around: rings take a round a worker, trees (halving and doubling) lg w; the
fastest is for each collective the faster of a ring and what libraries use for short messages."""

ROUNDS: dict[str, dict[str, Callable[[int], float]]] = {
    "ring": {"all-reduce": lambda w: 2 * (w - 1)},
    "tree": {
        "all-reduce": lambda w: 2 * math.log2(w),
        "all-gather": math.log2,
        "reduce-scatter": math.log2,
        "collective-broadcast": math.log2,
    },
}


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


WHOLE = {"all-reduce": 2.0}
"""How often a byte leaves a worker of a tree that is a pipeline, up and down, as those of NCCL."""


def rounds(kind: str, workers: int, algorithm: Literal["ring", "tree"] = "ring") -> float:
    """Function: how often a collective pays the latency."""
    if kind in ROUNDS[algorithm]:
        return ROUNDS[algorithm][kind](workers)
    return 1.0 if kind == "collective-permute" else workers - 1.0


def collective_seconds(
    kind: str, size: float, workers: int, link: Link, algorithm: Algorithm = "fastest"
) -> float:
    """Function: what a collective takes to which each of so many workers hands `size` bytes.

    In a ring and by halving and doubling as many bytes leave a worker. The fastest is a ring or, of
    a sum, a pipelined tree, in which each byte goes up and down: w/(w - 1) times as many in lg w
    rounds each way; all other collectives double or halve, but all-to-alls.

    Args:
      kind: as in `fg.tools.Collective`.
      size: bytes of one worker.
      workers: how many take part.
      link: that of each worker.
      algorithm: "fastest", "ring" or "tree"; of an all-to-all each worker sends to each in any
        case.
    """
    if algorithm not in get_args(Algorithm):
        raise ValueError(
            f"collective_seconds(algorithm): must be one of {get_args(Algorithm)}, got "
            f"{algorithm!r}; use 'fastest'."
        )
    if workers == 1:
        return 0.0
    over = size * RING[kind](workers)
    if algorithm != "fastest":
        return link_seconds(kind, rounds(kind, workers, algorithm), over, link)
    most = max(over, size * WHOLE.get(kind, 0.0))
    return min(
        link_seconds(kind, rounds(kind, workers), over, link),
        link_seconds(kind, rounds(kind, workers, "tree"), most, link),
    )


def link_seconds(kind: str, rounds: float, over: float, link: Link) -> float:
    """Function: what so many rounds take that send `over` bytes over a link in all."""
    return rounds * link.latency + over / (link.bandwidth * dict(link.shares).get(kind, 1.0))


def exchange_seconds(
    collectives: Iterable[Collective],
    links: Link | Mapping[str, Link],
    algorithm: Algorithm = "fastest",
) -> float:
    """Function: what collectives take one after the other.

    Args:
      collectives: from a trace or a compiled program, each with its number of workers.
      links: the link of every worker, or one for each axis; the slowest of its axes holds up a
        collective along several.
      algorithm: "fastest", "ring" or "tree".
    """

    def seconds(c: Collective) -> float:
        along = [links] if isinstance(links, Link) else [links[axis] for axis in c.axes or ()]
        each = (collective_seconds(c.kind, c.bytes, c.workers or 1, x, algorithm) for x in along)
        return max(each)

    return sum(map(seconds, collectives))


def step_seconds(parts: Parts, *, every: int = 1, buckets: int = 1) -> float:
    """Function: what a step takes.

    Args:
      parts: seconds of the parts; compress, exchange and decompress of one exchange.
      every: H, steps between two exchanges, of which the mean is taken.
      buckets: B, in how many messages the gradient leaves while it is found; 1 if nothing hides
        anything. Where there are local steps, nothing does.
    """
    step, compress, exchange, decompress = parts
    if every > 1:
        return step + (compress + exchange + decompress) / every
    hidden = exchange * (buckets - 1) / buckets
    return max(step + compress, hidden) + exchange / buckets + decompress
