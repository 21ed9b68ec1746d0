"""What a step's communication costs, by RedSync's model."""

import math
from typing import NamedTuple


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
    hops = math.log2(workers)
    others = workers - 1
    sent = fraction * elements * bits / 8
    sparse = select + hops * latency + others * sent / bandwidth + workers * decompress
    dense = 2 * hops * latency + 2 * others / workers * dense_bits / 8 * elements / bandwidth
    return SyncCost(sparse, dense + others / workers * elements / reduce_rate)
