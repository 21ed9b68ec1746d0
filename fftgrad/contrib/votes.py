"""Votes on the largest coefficients, and what noisy ones tell of a worker.

The accountant takes an extra: `pip install -e ".[privacy]"`.
"""

from fftgrad.contrib._epsilon import epsilon, rdp, sensitivity
from fftgrad.contrib._scale_by_datalens import scale_by_datalens
from fftgrad.contrib._top_votes import TopVotes

__all__ = [
    "TopVotes",
    "epsilon",
    "rdp",
    "scale_by_datalens",
    "sensitivity",
]
