"""Rényi differential privacy of a step, in closed form."""

from fftgrad._contracts import PyTree
from fftgrad._values import check_kind
from fftgrad.contrib import _sensitivity
from fftgrad.contrib._top_votes import TopVotes
from fftgrad.exchanges._layout import Layout


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
      >>> import jax.numpy as jnp
      >>> from fftgrad.contrib import votes
      >>> votes.rdp(votes.TopVotes(workers=8, k=25, sigma=10.0), jnp.zeros(100), order=2.0)
      1.0

    References:
      Mironov, "Rényi Differential Privacy", CSF 2017, arXiv:1702.07476. Wang et al., "DataLens",
      CCS 2021, arXiv:2103.11109.
    """
    check_kind("rdp(votes)", votes, TopVotes, "pass the TopVotes of the training.")
    if not order > 1:
        raise ValueError(f"rdp(order): must be above 1, got {order}; use order=2.")
    ratio = _sensitivity.noise_multiplier(votes, like, layout, colluding)
    return order / (2 * ratio**2) if ratio else float("inf")
