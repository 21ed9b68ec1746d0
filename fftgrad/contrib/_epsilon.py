"""Differential privacy of a whole training, by an accountant."""

import math
from typing import Any

from fftgrad._contracts import PyTree
from fftgrad._values import check_kind
from fftgrad.contrib import _sensitivity
from fftgrad.contrib._top_votes import TopVotes
from fftgrad.exchanges._layout import Layout


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

    Neighbors differ in all that one worker has to say, in every step: its votes are replaced by
    any others. A record that no other worker ever has is covered as part of it, and one that moves
    between the workers too, as long as a step has it with one worker at most. Each step adds the
    Gaussian mechanism, with no gain by sampling, which is not claimed, because a worker votes in
    every step.

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
      >>> import jax.numpy as jnp
      >>> from fftgrad.contrib import votes
      >>> noisy = votes.TopVotes(workers=1000, k=25, sigma=100.0)
      >>> round(votes.epsilon(noisy, jnp.zeros(1000), steps=100, delta=1e-5), 2)
      4.73

    References:
      Mironov, "Rényi Differential Privacy", CSF 2017, arXiv:1702.07476. Wang et al., "DataLens",
      CCS 2021, arXiv:2103.11109.
    """
    check_kind("epsilon(votes)", votes, TopVotes, "pass the TopVotes of the training.")
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(
            f"epsilon(steps): must be a whole number from 0 on, got {steps!r}; count all steps."
        )
    if not 0 < delta < 1:
        raise ValueError(f"epsilon(delta): must be in (0, 1), got {delta}; use delta=1e-5.")
    ratio = _sensitivity.noise_multiplier(votes, like, layout, colluding)
    if not steps:
        return 0.0
    if not ratio:
        return math.inf
    try:
        import dp_accounting
        from dp_accounting import rdp as accounting
    except ImportError as error:
        raise ImportError(
            "epsilon(): needs dp-accounting, got none; install it by pip install 'fftgrad[privacy]'"
        ) from error
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant: Any = accounting.RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.GaussianDpEvent(ratio), steps)
    return float(accountant.get_epsilon(delta))
