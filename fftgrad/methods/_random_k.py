"""Random-k sparsification with shared randomness."""

from fftgrad._contracts import Memory
from fftgrad.codecs.selectors._random_k import RandomK
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback, NoMemory


def random_k(fraction: float = 0.01, *, memory: Memory = ErrorFeedback()) -> Recipe:
    """Method: send the values at random positions, the same on all workers, summed on the way.

    Args:
      fraction: share of the values sent, k = ceil(fraction · n).
      memory: what is done with the rest. With `NoMemory()` what is sent is multiplied by n/k, so
        that the mean is unbiased.

    Wire: 4k bytes in one all-reduce, no indices, whatever the number of workers.

    Claims: unbiased without memory; with feedback, nothing is lost.

    Differs from the paper: one position from each of k intervals (`RandomK`).

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.random_k(fraction=0.01), axis_name="data")

    References:
      Stich et al., NeurIPS 2018, arXiv:1809.07599.
    """
    codec = RandomK(fraction=fraction, rescale=memory == NoMemory())
    return Recipe(AllReduce(codec), memory)
