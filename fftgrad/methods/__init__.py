"""Methods: published algorithms as combinations of codec, exchange, memory and bucketing.

Most methods return a `Recipe` for `compressed_pmean`. Methods named `scale_by_` return an optax
transformation. May import everything but `optimizers` and `tools`.
"""

from fftgrad.methods._fft_sparsification import (
    diminishing_theta,
    fft_sparsification,
    recover_by_loss,
)
from fftgrad.methods._recipes import (
    acp_sgd,
    adacomp,
    demo,
    dgc,
    eden,
    power_sgd,
    qsgd,
    random_k,
    redsync,
    scalecom,
    sign_sgd,
    terngrad,
    top_k,
)
from fftgrad.methods._scale_by_dion import scale_by_dion
from fftgrad.methods._scale_by_signs import scale_by_majority_vote, scale_by_one_bit_adam

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
