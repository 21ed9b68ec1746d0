"""Optimizers: whole ones, as `optax.adam` is. Nothing goes after them in a chain.

May import everything but `tools`.
"""

from fftgrad.optimizers._beer import beer as beer
from fftgrad.optimizers._choco_sgd import choco_sgd as choco_sgd
from fftgrad.optimizers._diloco import diloco as diloco
from fftgrad.optimizers._feedback import feedback_adam as feedback_adam
from fftgrad.optimizers._feedback import feedback_sgd as feedback_sgd
from fftgrad.optimizers._sharded import sharded as sharded
from fftgrad.optimizers._sparse_loco import sparse_loco as sparse_loco
