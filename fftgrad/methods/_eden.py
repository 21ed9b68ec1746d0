"""DRIVE and EDEN."""

from fftgrad._contracts import Memory
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers._lloyd_max import LloydMax
from fftgrad.codecs.transforms._hadamard import Hadamard
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import NoMemory


def eden(bits: int = 1, block: int = 4096, *, memory: Memory = NoMemory()) -> Recipe:
    """Method: rotate at random, round to the best few values for a normal distribution, rescale.

    Args:
      bits: width of a code, 1 to 6; one bit is DRIVE.
      block: values rotated together, a power of two.
      memory: the paper has none.

    Wire: n · bits / 8 + 4n / block bytes.

    Claims: close to unbiased (`LloydMax`).

    Differs from the paper: rotates blocks instead of whole vectors, all workers alike, so that one
      inverse rotation serves all; the errors of workers with like gradients are then alike too,
      and average out less than with rotations of their own.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.eden(bits=2), axis_name="data")

    References:
      Vargaftik et al., NeurIPS 2021, arXiv:2105.08339. Vargaftik et al., ICML 2022,
      arXiv:2108.08842.
    """
    codec = chain(Hadamard(block), LloydMax(bits, block))
    return Recipe(AllGather(codec), memory)
