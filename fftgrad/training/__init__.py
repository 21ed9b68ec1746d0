"""Training: what returns an optax transformation, its state and how that is sharded.

May import all but `methods`, `optimizers` and `tools`.
"""

from fftgrad.training._accumulate import accumulate as accumulate
from fftgrad.training._capture import capture as capture
from fftgrad.training._captured import Captured as Captured
from fftgrad.training._captured import captured as captured
from fftgrad.training._clip import clip_by_local_norm as clip_by_local_norm
from fftgrad.training._data_parallel import data_parallel as data_parallel
from fftgrad.training._delay import delay as delay
from fftgrad.training._gather_parameters import gather_parameters as gather_parameters
from fftgrad.training._init import init as init
from fftgrad.training._lay_out import Resharded as Resharded
from fftgrad.training._metrics import metrics as metrics
from fftgrad.training._offload import offload as offload
from fftgrad.training._per_worker import per_worker as per_worker
from fftgrad.training._pmean import CompressedPmeanState as CompressedPmeanState
from fftgrad.training._pmean import compressed_pmean as compressed_pmean
from fftgrad.training._reshard import reshard_state as reshard_state
from fftgrad.training._sharded import Scattered as Scattered
from fftgrad.training._sharded import compressed_all_gather as compressed_all_gather
from fftgrad.training._sharded import compressed_psum_scatter as compressed_psum_scatter
from fftgrad.training._state_specs import state_specs as state_specs
from fftgrad.training._trainable import trainable as trainable
from fftgrad.training._value_and_grad import value_and_grad as value_and_grad
