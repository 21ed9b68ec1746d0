"""Methods: what papers publish, as combinations of parts.

Each is a step of an optax chain: it returns a transformation that goes before an optimizer, unless
its name says `scale_by_`, as in optax. May import everything but `optimizers` and `tools`.
"""

from fftgrad.methods._acp_sgd import acp_sgd as acp_sgd
from fftgrad.methods._adacomp import adacomp as adacomp
from fftgrad.methods._datalens import datalens as datalens
from fftgrad.methods._demo import demo as demo
from fftgrad.methods._dgc import dgc as dgc
from fftgrad.methods._diminishing_theta import diminishing_theta as diminishing_theta
from fftgrad.methods._dion import dion as dion
from fftgrad.methods._eden import eden as eden
from fftgrad.methods._fft_sparsification import fft_sparsification as fft_sparsification
from fftgrad.methods._majority_vote import majority_vote as majority_vote
from fftgrad.methods._power_sgd import power_sgd as power_sgd
from fftgrad.methods._qsgd import qsgd as qsgd
from fftgrad.methods._random_k import random_k as random_k
from fftgrad.methods._redsync import redsync as redsync
from fftgrad.methods._scale_by_one_bit_adam import scale_by_one_bit_adam as scale_by_one_bit_adam
from fftgrad.methods._scalecom import scalecom as scalecom
from fftgrad.methods._sign_sgd import sign_sgd as sign_sgd
from fftgrad.methods._terngrad import terngrad as terngrad
from fftgrad.methods._top_k import top_k as top_k
