"""How far one worker moves the sum of votes."""

import math

from fftgrad._contracts import PyTree
from fftgrad._values import check_kind
from fftgrad.contrib._top_votes import TopVotes
from fftgrad.exchanges import _layout
from fftgrad.exchanges._layout import Layout


def sensitivity(votes: TopVotes, like: PyTree, *, layout: Layout = Layout()) -> float:
    """Function: the L2 sensitivity of a step's sum of votes to what one worker has to say.

    A worker has at most K = Σ_j k_j votes of size one, over the parts j of all buckets. Two of
    its votes on a coordinate differ by 2 at most, so in place of any gradient any other moves the
    sum by at most √(4K): by 2 on the same K coordinates, or by 1 on each of 2K others, √(2K).

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      layout: that of the training, which says what is a part.

    Returns:
      √(4K).

    Raises:
      TypeError: if `votes` is no `TopVotes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=8, k=25)
      >>> votes.sensitivity(noisy, {"w": jnp.zeros((10, 10)), "b": jnp.zeros(10)})
      10.0

    References:
      Wang et al., "DataLens", CCS 2021, arXiv:2103.11109.
    """
    check_kind("sensitivity(votes)", votes, TopVotes, "pass the TopVotes of the training.")
    buckets = _layout.bucket_likes(like, layout.for_exchange(votes))
    return math.sqrt(4 * sum(map(votes.votes, buckets)))


def noise_multiplier(votes: TopVotes, like: PyTree, layout: Layout, colluding: int) -> float:
    """The deviation of the noise that some do not know, over the sensitivity."""
    if not 0 <= colluding < votes.workers:
        raise ValueError(
            f"epsilon(colluding): must leave one of {votes.workers} workers, got {colluding}; use "
            "0 for an adversary who is no worker."
        )
    if colluding and votes.noise == "shared" and votes.sigma:
        raise ValueError(
            "epsilon(colluding): must be 0 with shared noise, because every worker can take it off "
            f"again, got {colluding}; use TopVotes(noise='local')."
        )
    unknown = (votes.workers - colluding) / votes.workers
    return votes.sigma * math.sqrt(unknown) / sensitivity(votes, like, layout=layout)
