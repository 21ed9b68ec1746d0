"""Training: what returns an optax transformation, its state and how that is sharded.

May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.training._accumulate import accumulate
from fftgrad.training._clip import clip_by_local_norm
from fftgrad.training._data_parallel import data_parallel
from fftgrad.training._delay import delay
from fftgrad.training._init_state import init_state
from fftgrad.training._metrics import metrics
from fftgrad.training._per_worker import per_worker
from fftgrad.training._pmean import CompressedPmeanState, compressed_pmean
from fftgrad.training._state_specs import state_specs
from fftgrad.training._trainable import trainable
from fftgrad.training._value_and_grad import value_and_grad

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
