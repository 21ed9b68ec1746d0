"""PowerSGD."""

import optax

from fftgrad._contracts import AxisName, Memory
from fftgrad.exchanges._power_sgd import PowerSgd
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.training._pmean import compressed_pmean


def power_sgd(
    rank: int = 2,
    *,
    memory: Memory = ErrorFeedback(),
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Method: the gradient of each matrix by two thin factors, with error feedback.

    Args:
      rank: columns of a factor.
      memory: the paper's feedback, without decay.
      axis_name: the axis of the workers.

    Returns:
      An optax transformation, to be chained before the optimizer, with its momentum: the paper
      applies it after decompressing.

    Wire: 4 · rank · (rows + columns) bytes a matrix and 4 bytes for each value of other leaves, in
      two all-reduces, whatever the number of workers.

    Claims: nothing is lost; parameters equal on all workers.

    Differs from the paper: Householder reflections in place of Gram-Schmidt (`PowerSgd`).

    Raises:
      ValueError: if `rank` is not positive.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = optax.chain(fg.methods.power_sgd(rank=2), optax.sgd(0.1, momentum=0.9))

    References:
      Vogels et al., "PowerSGD", NeurIPS 2019, arXiv:1905.13727.
    """
    return compressed_pmean(PowerSgd(rank), memory, axis_name=axis_name)
