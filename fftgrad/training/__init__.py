"""Training: what returns an optax transformation, its state and how that is sharded.

May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.training._data_parallel import data_parallel
from fftgrad.training._metrics import metrics
from fftgrad.training._pmean import CompressedPmeanState, compressed_pmean
from fftgrad.training._state import init_state, state_specs
from fftgrad.training._value_and_grad import value_and_grad
from fftgrad.training._wrappers import accumulate, clip_by_local_norm, delay, per_worker, trainable

__all__ = [
    "CompressedPmeanState",
    "accumulate",
    "clip_by_local_norm",
    "compressed_pmean",
    "data_parallel",
    "delay",
    "init_state",
    "metrics",
    "per_worker",
    "state_specs",
    "trainable",
    "value_and_grad",
]
