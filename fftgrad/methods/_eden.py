"""DRIVE and EDEN."""

import jax
import optax

from fftgrad import _tree
from fftgrad._base import AxisName, Memory
from fftgrad._chain import chain
from fftgrad._pmean import compressed_pmean
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.memories._no_memory import NoMemory
from fftgrad.quantizers._lloyd_max import LloydMax
from fftgrad.transforms._hadamard import Hadamard


def eden(
    bits: int = 1,
    block: int = 4096,
    *,
    memory: Memory = NoMemory(),
    scope: _tree.Scope = "model",
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: rotate at random, round to the best few values for a normal distribution, rescale.

    Args:
      bits: width of a code, 1 to 6; one bit is DRIVE.
      block: values rotated together, a power of two.
      memory: the paper has none.
      scope: what is cut into blocks: "model", "leaf", or a function that names groups.
      axis_name: the axis of the workers.
      key: seed or PRNG key of the rotation, equal on all workers.

    Returns:
      An optax transformation, to be chained before the optimizer.

    Wire: n · bits / 8 + 4n / block bytes.

    Claims: close to unbiased (`LloydMax`).

    Differs from the paper: rotates blocks instead of whole vectors, all workers alike, so that one
      inverse rotation serves all; the errors of workers with like gradients are then alike too,
      and average out less than with rotations of their own.

    Raises:
      ValueError: if an argument is outside its part's range.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = optax.chain(fg.methods.eden(bits=2), optax.sgd(0.1, momentum=0.9))

    References:
      Vargaftik et al., "DRIVE", NeurIPS 2021, arXiv:2105.08339. Vargaftik et al., "EDEN", ICML
      2022, arXiv:2108.08842.
    """
    codec = chain(Hadamard(block), LloydMax(bits, block))
    return compressed_pmean(AllGather(codec), memory, axis_name=axis_name, scope=scope, key=key)
