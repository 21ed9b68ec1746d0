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

from fftgrad.ops._collectives import RING, Collective
from fftgrad.tools._link import Link

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
      kind: as in `fg.Collective`.
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


class SyncCost(NamedTuple):
    """Seconds to average one gradient: sparse by all-gather, dense by all-reduce."""

    sparse: float
    dense: float


def redsync_cost(
    elements: int,
    workers: int,
    fraction: float,
    *,
    latency: float,
    bandwidth: float,
    select: float = 0.0,
    decompress: float = 0.0,
    reduce_rate: float = math.inf,
    bits: float = 64.0,
    dense_bits: float = 32.0,
) -> SyncCost:
    """Function: RedSync's cost model of a sparse against a dense mean.

        T_sparse = select + lg(p) α + (p - 1) M D β + p γ₂
        T_dense  = 2 lg(p) α + 2 (p - 1)/p M β + (p - 1)/p M γ₁

    with p workers, M elements, the share D of them sent, latency α, β the time an element takes on
    the link. The traffic of the sparse mean grows with p: at p = 128 and D = 0.1 % it is 12.8 % of
    M.

    Args:
      elements: M.
      workers: p.
      fraction: D, the share of the elements that is sent.
      latency: α, seconds a message takes however short it is.
      bandwidth: bytes per second of a worker's link.
      select: seconds to select and pack.
      decompress: γ₂, seconds to decode one message.
      reduce_rate: 1/γ₁, elements per second that a worker adds.
      bits: of one element sent sparse, with its index; the paper sends 64, `TopK` about
        34 + log2(1/fraction).
      dense_bits: of one element sent dense; 16 for a mean in bfloat16.

    Returns:
      A `SyncCost`, in seconds.

    Raises:
      ValueError: if sizes or rates are not positive.

    Example:
      >>> import fftgrad as fg
      >>> cost = fg.redsync_cost(25_000_000, 8, 0.001, latency=5e-5, bandwidth=1.25e8)
      >>> f"{cost.dense / cost.sparse:.0f} times"
      '123 times'

    References:
      Fang et al., "RedSync", JPDC 133, 2019, arXiv:1808.04357.
    """
    if (
        min(elements, workers, fraction, bandwidth, reduce_rate, bits, dense_bits) <= 0
        or latency < 0
    ):
        raise ValueError(
            f"redsync_cost(...): sizes and rates must be positive, got elements={elements}, "
            f"workers={workers}, fraction={fraction}, bandwidth={bandwidth}; measure them, or use "
            "bandwidth=1.25e8 for 1 Gbit/s."
        )
    link = Link(bandwidth, latency)
    sent, whole = fraction * elements * bits / 8, elements * dense_bits / 8
    gathered = collective_seconds("all-gather", sent, workers, link, "tree")
    reduced = collective_seconds("all-reduce", whole, workers, link, "tree")
    sparse = Parts(0.0, select, gathered, workers * decompress)
    adding = (workers - 1) / workers * elements / reduce_rate
    return SyncCost(step_seconds(sparse), step_seconds(Parts(0.0, 0.0, reduced, adding)))
