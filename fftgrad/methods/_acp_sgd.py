"""ACP-SGD."""

from fftgrad._contracts import Memory
from fftgrad.exchanges._acp_sgd import AcpSgd
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


def acp_sgd(rank: int = 4, *, memory: Memory = ErrorFeedback()) -> Recipe:
    """Method: the gradient of each matrix by two thin factors, one a step, with error feedback.

    Args:
      rank: columns of a factor; the paper's is 4 for ResNets and 32 for BERT.
      memory: the paper's feedback, without decay.

    Wire: about 2 · rank · (rows + columns) bytes a matrix and 4 bytes for each value of other
      leaves, in one all-reduce, whatever the number of workers (`AcpSgd`).

    Claims: nothing is lost.

    Differs from the paper: as `AcpSgd` does.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.acp_sgd(rank=4), axis_name="data")

    References:
      Zhang et al., ICDCS 2023, arXiv:2306.08881.
    """
    return Recipe(AcpSgd(rank), memory)
