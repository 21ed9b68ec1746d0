"""Random-k sparsification with shared randomness."""

import jax
import optax

from fftgrad import _tree
from fftgrad._base import AxisName, Memory
from fftgrad._pmean import compressed_pmean
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.memories._no_memory import NoMemory
from fftgrad.selectors._random_k import RandomK


def random_k(
    density: float = 0.01,
    *,
    memory: Memory = ErrorFeedback(),
    scope: _tree.Scope = "model",
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: send the values at random positions, the same on all workers, summed on the way.

    Args:
      density: share of the values sent, k = ceil(density · n).
      memory: what is done with the rest. With `NoMemory()` what is sent is multiplied by n/k, so
        that the mean is unbiased.
      scope: what k is counted over: "model", "leaf", or a function that names groups.
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
      >>> tx = optax.chain(fg.methods.random_k(density=0.01), optax.sgd(0.1))

    References:
      Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599.
    """
    codec = RandomK(fraction=density, rescale=memory == NoMemory())
    return compressed_pmean(AllReduce(codec), memory, axis_name=axis_name, scope=scope, key=key)
