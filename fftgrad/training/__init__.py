"""Training: optax transformations, their states, and the PartitionSpecs of these states.

May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.training._data_parallel import data_parallel
from fftgrad.training._metrics import metrics
from fftgrad.training._pmean import CompressedPmeanState, compressed_pmean
from fftgrad.training._state import init_state, state_specs
from fftgrad.training._value_and_grad import value_and_grad
from fftgrad.training._wrappers import (
    clip_by_local_norm,
    local_state,
    multi_steps,
    trainable,
)

__all__ = [
    "CompressedPmeanState",
    "clip_by_local_norm",
    "compressed_pmean",
    "data_parallel",
    "init_state",
    "local_state",
    "metrics",
    "multi_steps",
    "state_specs",
    "trainable",
    "value_and_grad",
]
