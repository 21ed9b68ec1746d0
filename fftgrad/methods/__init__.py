"""Methods: what papers publish, as combinations of parts.

Each returns a `Recipe`, of which `compressed_pmean` makes a step of an optax chain; its claims hold
for all of them. What is named `scale_by_` is a transformation already, as in optax. May import
everything but `optimizers` and `tools`.
"""

from fftgrad.methods._recipes import (
    acp_sgd,
    adacomp,
    demo,
    dgc,
    diminishing_theta,
    eden,
    fft_sparsification,
    power_sgd,
    qsgd,
    random_k,
    redsync,
    scalecom,
    sign_sgd,
    terngrad,
    top_k,
)
from fftgrad.methods._recover_by_loss import recover_by_loss
from fftgrad.methods._scale_by_dion import scale_by_dion
from fftgrad.methods._scale_by_majority_vote import scale_by_majority_vote
from fftgrad.methods._scale_by_one_bit_adam import scale_by_one_bit_adam

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
