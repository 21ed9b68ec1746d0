"""Random-k sparsification with shared randomness."""

import jax
import optax

from fftgrad._contracts import AxisName, Memory
from fftgrad.codecs.selectors._random_k import RandomK
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._layout import Layout
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.memories._no_memory import NoMemory
from fftgrad.training._pmean import compressed_pmean


def random_k(
    fraction: float = 0.01,
    *,
    memory: Memory = ErrorFeedback(),
    layout: Layout = Layout(),
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: send the values at random positions, the same on all workers, summed on the way.

    Args:
      fraction: share of the values sent, k = ceil(fraction · n).
      memory: what is done with the rest. With `NoMemory()` what is sent is multiplied by n/k, so
        that the mean is unbiased.
      layout: what k is counted over, and what travels at once; see `Layout`.
      axis_name: the axis of the workers.
      key: seed or PRNG key of the positions, equal on all workers.

    Returns:
      An optax transformation, to be chained before the optimizer.

    Wire: 4k bytes in one all-reduce, no indices, whatever the number of workers.

    Claims: unbiased without memory; with feedback, nothing is lost.

    Differs from the paper: one position from each of k intervals (`RandomK`).

    Raises:
      ValueError: if an argument is outside its part's range.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = optax.chain(fg.methods.random_k(fraction=0.01), optax.sgd(0.1))

    References:
      Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599.
    """
    codec = RandomK(fraction=fraction, rescale=memory == NoMemory())
    return compressed_pmean(AllReduce(codec), memory, axis_name=axis_name, layout=layout, key=key)
