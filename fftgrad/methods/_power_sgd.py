"""PowerSGD."""

from fftgrad._contracts import Memory
from fftgrad.exchanges._power_sgd import PowerSgd
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


def power_sgd(
    rank: int = 2,
    *,
    memory: Memory = ErrorFeedback(),
) -> Recipe:
    """Method: the gradient of each matrix by two thin factors, with error feedback.

    Args:
      rank: columns of a factor.
      memory: the paper's feedback, without decay.

    Returns:
      A `Recipe`.

    Wire: 4 · rank · (rows + columns) bytes a matrix and 4 bytes for each value of other leaves, in
      two all-reduces, whatever the number of workers.

    Claims: nothing is lost; parameters equal on all workers.

    Differs from the paper: Householder reflections in place of Gram-Schmidt (`PowerSgd`).

    Raises:
      ValueError: if `rank` is not positive.

    Example:
      >>> import fftgrad as fg
      >>> tx = fg.compressed_pmean(fg.methods.power_sgd(rank=2), axis_name="data")

    References:
      Vogels et al., "PowerSGD", NeurIPS 2019, arXiv:1905.13727.
    """
    return Recipe(PowerSgd(rank), memory)
