"""Optimizers: whole ones, as `optax.adam` is. Nothing goes after them in a chain.

May import everything but `tools`.
"""

from fftgrad.exchanges._fragments import fragment
from fftgrad.optimizers._diloco import diloco
from fftgrad.optimizers._feedback import feedback_adam, feedback_sgd
from fftgrad.optimizers._feedback_muon import feedback_muon, muon_dimensions
from fftgrad.optimizers._scatter import (
    Scattered,
    compressed_all_gather,
    compressed_psum_scatter,
    gather_parameters,
)
from fftgrad.optimizers._sharded import sharded
from fftgrad.optimizers._sparse_loco import sparse_loco

__all__ = [
    "Scattered",
    "compressed_all_gather",
    "compressed_psum_scatter",
    "diloco",
    "feedback_adam",
    "feedback_muon",
    "feedback_sgd",
    "fragment",
    "gather_parameters",
    "muon_dimensions",
    "sharded",
    "sparse_loco",
]
