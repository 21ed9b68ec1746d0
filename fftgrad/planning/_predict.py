"""Seconds of a step over links: the model, the codec time of an exchange, and its traffic.

    step     = backward pass and optimizer, without any exchange
    muon     = Muon's matrix products, of a row that has Muon in place of the optimizer
    exchange = Σ over collectives of rounds · α + bytes over the link / β
    seconds  = step + muon + (compress + exchange + decompress) / H

with the latency α and the bandwidth β of a link, and an exchange every H steps. A gradient that
travels in B buckets leaves while the backward pass runs, all but the last of them:

    seconds  = max(step + compress, (B - 1) / B · exchange) + exchange / B + decompress + muon

as Agarwal et al. model dense training (MLSys 2022, arXiv:2103.00543). RedSync's model
(arXiv:1808.04357) is the one with trees, one bucket, and w times the seconds that one payload takes
to decode; that of the FFT paper (HPDC 2020) the one of two workers without latency, in which
compressing and decompressing take as long.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import PyTree
from fftgrad._values import check_choice, check_count, check_kind, check_transformation
from fftgrad.ops import _collectives
from fftgrad.ops._collectives import RING, Collective
from fftgrad.planning import _alone, _inputs, _link, _timing
from fftgrad.planning._link import Link, link_seconds, rounds

Algorithm = Literal["fastest", "ring", "tree"]
"""Algorithm of collectives. A ring takes a round for each worker, a tree lg w. "fastest" is the
faster of a ring and the algorithm that libraries use for short messages."""
PIPELINED = {"all-reduce": 2.0}
"""How often a byte leaves a worker in a pipelined tree, as in NCCL: once up and once down."""


class Parts(NamedTuple):
    """The parts of a step, in seconds.

    Attributes:
      step: backward pass and optimizer.
      compress: until the first message can leave.
      exchange: on the links.
      decompress: decoding, and all else that follows the first message.
      muon: Muon's matrix products, if they are known apart.
    """

    step: float
    compress: float
    exchange: float
    decompress: float
    muon: float = 0.0


def collective_seconds(
    kind: str, size: float, workers: int, link: Link, algorithm: Algorithm = "fastest"
) -> float:
    """Seconds of a collective to which each worker passes `size` bytes.

    A ring sends as many bytes as halving and doubling. A pipelined tree of an all-reduce sends
    w/(w - 1) times as many, in lg w rounds each way. An all-to-all has no tree.
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


def exchange_seconds(
    collectives: Iterable[Collective],
    links: Link | Mapping[str, Link],
    algorithm: Algorithm = "fastest",
) -> float:
    """Seconds of collectives one after the other.

    A collective along several axes takes as long as along the slowest of them.
    """

    def seconds(c: Collective) -> float:
        along = [links] if isinstance(links, Link) else [links[axis] for axis in c.axes or ()]
        each = (collective_seconds(c.kind, c.bytes, c.workers or 1, x, algorithm) for x in along)
        return max(each)

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


class Timing(NamedTuple):
    """Codec time of an exchange on a device, without the links.

    Attributes:
      compress: seconds until the first message can leave.
      decompress: seconds of the rest: decoding the payloads of all workers, memory, the mean.
      muon: seconds of Muon's matrix products in a step, if they are known separately.
    """

    compress: float
    decompress: float
    muon: float = 0.0


def time_exchange(
    tx: optax.GradientTransformation,
    params: PyTree,
    axes: Mapping[str, int],
    *,
    every: int = 1,
    seconds: float = 0.5,
) -> Timing:
    """Function: time the exchange of any chain on this device, without the links.

    One device is enough for any number of workers: each collective returns the result for workers
    that all sent the same. The time includes decoding their payloads. Use it for a chain that no
    `fg.planning.Candidate` describes, such as an optimizer that exchanges.

    Args:
      tx: chain, without the optimizer if `step` includes it.
      params: parameters, or their shapes.
      axes: number of workers along each axis: `{"data": 16}`.
      every: number of local steps for one exchange. All of them are timed.
      seconds: approximate duration of the rounds.

    Returns:
      A `Timing`. With local steps all of it is in `decompress`, because nothing overlaps.

    Example:
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.01), axis_name="data")
      >>> timing = fg.planning.time_exchange(dgc, jnp.zeros(1000), {"data": 4}, seconds=0.01)
      >>> timing.compress > 0
      True
    """
    check_transformation("time_exchange(tx)", tx)
    check_count("time_exchange(every)", every, "use 1 without local steps.")
    like = _inputs.like_of("time_exchange", params)
    update: Any = jax.jit(_alone.alone(tx.update, axes), donate_argnums=1)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    # Compiled, so that no two arrays share a buffer: one cannot be given away twice.
    state, gradients = jax.jit(tx.init)(zeros), _inputs.heavy_tailed(like)

    def turn(gradient: PyTree) -> Any:
        nonlocal state
        mean = None
        for _ in range(every):
            mean, state = update(gradient, state, zeros)
        return mean, state

    # One round is enough of an exchange that takes longer than `seconds`.
    took, first = _timing.timed(turn, gradients, seconds, 1).seconds, 0.0
    if every == 1:  # nothing overlaps with local steps
        start = jax.jit(_alone.until_sent(tx.update, axes))
        begin = lambda gradient: start(gradient, state, zeros)  # noqa: E731
        first = min(took, _timing.timed(begin, gradients, seconds, 1).seconds)
    return Timing(first, took - first)


def traffic(
    argument: str,
    tx: Any,
    like: PyTree,
    axes: Mapping[str, int],
    every: int = 1,
) -> tuple[Collective, ...]:
    """The collectives of a transformation in so many steps; errors name the `argument`.

    Collectives under a condition run in one of the steps, all others in each.
    """
    state = jax.eval_shape(tx.init, like)
    found = _collectives.collectives(tx.update, axes, like, state, like)
    if any(c.repeated for c in found):
        raise ValueError(
            f"{argument}: must send outside of loops, got a collective in one, whose turns a trace "
            "does not count; unroll it."
        )
    # Of one conditional, one branch sends. Of several, only some of them do in a step.
    if len({c.branch for c in found if c.branch}) > (every > 1):
        raise ValueError(
            f"{argument}: must send the same in every step, got an exchange that changes by step; "
            "say every=4 of 4 local steps, or plan the parts of a schedule one by one."
        )
    always = tuple(c for c in found if not c.branch)
    return always * every + tuple(c for c in found if c.branch)


def predict_step(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float | Mapping[str, Link],
    axes: Mapping[str, int],
    timing: Timing | None = None,
    every: int = 1,
    buckets: int = 1,
    algorithm: Algorithm = "fastest",
) -> float:
    """Function: predict the seconds of a step with any chain, as `plan` does for its candidates.

    The traffic is read off a trace, without devices; docs/results/predictions.md has the model.

    Args:
      tx: chain, without the optimizer if `step` includes it.
      params: parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: link of each worker, or its bandwidth: "1gbit"; or the link of each axis:
        `{"slow": ..., "fast": ...}`.
      axes: number of workers along each axis: `{"data": 16}`.
      timing: codec time. The default is what `fg.planning.time_exchange` returns here.
      every: number of local steps for one exchange.
      buckets: number of messages of a gradient, as many as the chain's
        `Bucketing(bucket_bytes=...)` makes.
      algorithm: algorithm of the collectives, as in `fg.planning.plan`.

    Returns:
      Seconds of a step, the mean over those with and without an exchange.

    Raises:
      ValueError: if the traffic changes from step to step, or is in a loop.

    Example:
      >>> params = jax.ShapeDtypeStruct((5000, 5000), "float32")
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.001), axis_name="data")
      >>> timing = fg.planning.Timing(compress=0.05, decompress=0.02)
      >>> link = fg.planning.Link("1gbit", "100us")
      >>> seconds = fg.planning.predict_step(
      ...     dgc, params, step="300ms", link=link, axes={"data": 16}, timing=timing
      ... )
      >>> f"{seconds:.2f} s"
      '0.39 s'
    """
    check_transformation("predict_step(tx)", tx)
    check_count("predict_step(every)", every, "use 1 without local steps.")
    check_count("predict_step(buckets)", buckets, "use 1 for no overlap.")
    check_choice("predict_step(algorithm)", algorithm, get_args(Algorithm))
    like, own = _inputs.like_of("predict_step", params), _link.seconds("predict_step(step)", step)
    links: Link | dict[str, Link]
    if isinstance(link, Mapping):
        links = {axis: Link.of(one) for axis, one in link.items()}
        if missing := sorted({*axes} - {*links}):
            raise ValueError(
                f"predict_step(link): must have a link for each axis, got none for {missing}; add "
                "fg.planning.Link('1gbit')."
            )
    else:
        links = Link.of(link)
    if timing is None:
        timing = time_exchange(tx, params, axes, every=every)
    check_kind("predict_step(timing)", timing, Timing, "use fg.planning.Timing(0.001, 0.002).")
    exchange = exchange_seconds(
        traffic("predict_step(tx)", tx, like, axes, every), links, algorithm
    )
    parts = Parts(own, timing.compress, exchange, timing.decompress, timing.muon)
    return step_seconds(parts, every=every, buckets=buckets)
