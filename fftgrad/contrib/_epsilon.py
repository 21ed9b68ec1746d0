"""Differential privacy: the sensitivity of a step, its Rényi privacy, and that of a training."""

import math
from typing import Any

from fftgrad._contracts import PyTree
from fftgrad._values import check_count, check_kind
from fftgrad.contrib._top_votes import TopVotes
from fftgrad.exchanges import _layout
from fftgrad.exchanges._layout import Layout


def sensitivity(votes: TopVotes, like: PyTree, *, layout: Layout = Layout()) -> float:
    """Function: the L2 sensitivity of a step's sum of votes to what one worker has to say.

    A worker has at most K = Σ_j k_j votes of size one, over the parts j of all buckets. Another
    gradient moves the sum by at most √(4K): by 2 on the same K coordinates. By 1 on each of 2K
    others it is √(2K).

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      layout: that of the training, which says what is a part.

    Returns:
      √(4K).

    Raises:
      TypeError: if `votes` is no `TopVotes`.

    Example:
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=8, k=25)
      >>> votes.sensitivity(noisy, {"w": jnp.zeros((10, 10)), "b": jnp.zeros(10)})
      10.0

    References:
      Wang et al., CCS 2021, arXiv:2103.11109.
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


def rdp(
    votes: TopVotes,
    like: PyTree,
    order: float,
    *,
    layout: Layout = Layout(),
    colluding: int = 0,
) -> float:
    """Function: the Rényi differential privacy of one step, at one order; steps add up.

        ε(a) = a Δ² / 2 sigma² = 2 a K / sigma²,    Δ = √(4K),  K = Σ_j k_j over all parts j

    Args:
      votes: the exchange.
      like: gradients or parameters, or their shapes.
      order: a, above 1.
      layout: that of the training, which says what is a part.
      colluding: how many workers pool what they know: see `epsilon`.

    Returns:
      ε(a); infinite without noise.

    Raises:
      ValueError: if `order` is not above 1, or `colluding` out of range.
      TypeError: if `votes` is no `TopVotes`.

    Example:
      >>> from fftgrad.contrib import votes
      >>> votes.rdp(votes.TopVotes(workers=8, k=25, sigma=10.0), jnp.zeros(100), order=2.0)
      1.0

    References:
      Mironov, CSF 2017, arXiv:1702.07476. Wang et al., CCS 2021, arXiv:2103.11109.
    """
    check_kind("rdp(votes)", votes, TopVotes, "pass the TopVotes of the training.")
    if not order > 1:
        raise ValueError(f"rdp(order): must be above 1, got {order}; use order=2.")
    ratio = noise_multiplier(votes, like, layout, colluding)
    return order / (2 * ratio**2) if ratio else float("inf")


def epsilon(
    votes: TopVotes,
    like: PyTree,
    *,
    steps: int,
    delta: float,
    layout: Layout = Layout(),
    colluding: int = 0,
) -> float:
    """Function: the ε for which all steps together are (ε, δ)-differentially private.

    Neighbors differ in all votes of one worker, in every step. So a record is covered too, as long
    as no two workers have it in the same step. Each step adds the Gaussian mechanism, without a
    gain by sampling, because a worker votes in every step.

    It counts what the means of votes tell to those who do not know the noise, and whatever is
    computed from them: updates, parameters. It does not count what else leaves the workers: losses,
    metrics, statistics of batches, that a gradient was not finite, and rates that were tuned on the
    same data. The noise is Gaussian in real numbers; on a machine it is of float32.

    Args:
      votes: the exchange. Its `noise` must fit the adversary, which the page on privacy tells.
      like: gradients or parameters, or their shapes: k follows from n.
      steps: of training, each of which is counted.
      delta: δ, well below one over the number of workers or records.
      layout: that of the training, which says what is a part.
      colluding: how many workers pool their votes and their shares of local noise, of which
        (w - colluding) / w of the variance remain.

    Returns:
      ε, by the best of the accountant's orders; infinite without noise.

    Raises:
      ValueError: if `steps`, `delta` or `colluding` is out of range.
      TypeError: if `votes` is no `TopVotes`.

    Example:
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=1000, k=25, sigma=100.0)
      >>> round(votes.epsilon(noisy, jnp.zeros(1000), steps=100, delta=1e-5), 2)
      4.73

    References:
      Mironov, CSF 2017, arXiv:1702.07476. Wang et al., CCS 2021, arXiv:2103.11109.
    """
    check_kind("epsilon(votes)", votes, TopVotes, "pass the TopVotes of the training.")
    steps = check_count("epsilon(steps)", steps, "count all steps.", least=0)
    if not 0 < delta < 1:
        raise ValueError(f"epsilon(delta): must be in (0, 1), got {delta}; use delta=1e-5.")
    ratio = noise_multiplier(votes, like, layout, colluding)
    if not steps:
        return 0.0
    if not ratio:
        return math.inf
    try:
        import dp_accounting
        from dp_accounting import rdp as accounting
    except ImportError as error:
        raise ImportError(
            "epsilon(): needs dp-accounting, got none; run pip install -e '.[privacy]' in the "
            "folder of the repository"
        ) from error
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant: Any = accounting.RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.GaussianDpEvent(ratio), steps)
    return float(accountant.get_epsilon(delta))
