"""DRIVE and EDEN."""

import jax
import optax

from fftgrad._contracts import AxisName, Memory
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers._lloyd_max import LloydMax
from fftgrad.codecs.transforms._hadamard import Hadamard
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._layout import Layout
from fftgrad.memories._no_memory import NoMemory
from fftgrad.training._pmean import compressed_pmean


def eden(
    bits: int = 1,
    block: int = 4096,
    *,
    memory: Memory = NoMemory(),
    layout: Layout = Layout(),
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: rotate at random, round to the best few values for a normal distribution, rescale.

    Args:
      bits: width of a code, 1 to 6; one bit is DRIVE.
      block: values rotated together, a power of two.
      memory: the paper has none.
      layout: what is cut into blocks, and what travels at once; see `Layout`.
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
    return compressed_pmean(AllGather(codec), memory, axis_name=axis_name, layout=layout, key=key)
