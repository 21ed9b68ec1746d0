"""Complete optimizers with a learning rate, like `optax.adam`. Chain nothing after them.

May import everything but `tools`.
"""

from fftgrad.optimizers._diloco import diloco, sparse_loco
from fftgrad.optimizers._feedback import feedback_adam, feedback_muon, muon_dimensions
from fftgrad.optimizers._sharded import gather_parameters, sharded

__all__ = [
    "diloco",
    "feedback_adam",
    "feedback_muon",
    "gather_parameters",
    "muon_dimensions",
    "sharded",
    "sparse_loco",
]
