"""PowerSGD."""

from fftgrad._contracts import Memory
from fftgrad.exchanges._power_sgd import PowerSgd
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


def power_sgd(rank: int = 2, *, memory: Memory = ErrorFeedback()) -> Recipe:
    """Method: the gradient of each matrix by two thin factors, with error feedback.

    Args:
      rank: columns of a factor.
      memory: the paper's feedback, without decay.

    Wire: 4 · rank · (rows + columns) bytes a matrix and 4 bytes for each value of other leaves, in
      two all-reduces, whatever the number of workers.

    Claims: nothing is lost.

    Differs from the paper: as `PowerSgd` does.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.power_sgd(rank=2), axis_name="data")

    References:
      Vogels et al., NeurIPS 2019, arXiv:1905.13727.
    """
    return Recipe(PowerSgd(rank), memory)
