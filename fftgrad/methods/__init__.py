"""Methods: what papers publish, as combinations of parts.

Each returns a `Recipe`, of which `compressed_pmean` makes a step of an optax chain; its claims hold
for all of them. What is named `scale_by_` is a transformation already, as in optax. May import
everything but `optimizers` and `tools`.
"""

from fftgrad.methods._acp_sgd import acp_sgd
from fftgrad.methods._adacomp import adacomp
from fftgrad.methods._demo import demo
from fftgrad.methods._dgc import dgc
from fftgrad.methods._diminishing_theta import diminishing_theta
from fftgrad.methods._eden import eden
from fftgrad.methods._fft_sparsification import fft_sparsification
from fftgrad.methods._power_sgd import power_sgd
from fftgrad.methods._qsgd import qsgd
from fftgrad.methods._random_k import random_k
from fftgrad.methods._recover_by_loss import recover_by_loss
from fftgrad.methods._redsync import redsync
from fftgrad.methods._scale_by_dion import scale_by_dion
from fftgrad.methods._scale_by_majority_vote import scale_by_majority_vote
from fftgrad.methods._scale_by_one_bit_adam import scale_by_one_bit_adam
from fftgrad.methods._scalecom import scalecom
from fftgrad.methods._sign_sgd import sign_sgd
from fftgrad.methods._terngrad import terngrad
from fftgrad.methods._top_k import top_k

__all__ = [
    "acp_sgd",
    "adacomp",
    "demo",
    "dgc",
    "diminishing_theta",
    "eden",
    "fft_sparsification",
    "power_sgd",
    "qsgd",
    "random_k",
    "recover_by_loss",
    "redsync",
    "scale_by_dion",
    "scale_by_majority_vote",
    "scale_by_one_bit_adam",
    "scalecom",
    "sign_sgd",
    "terngrad",
    "top_k",
]
