"""QSGD."""

from fftgrad.codecs.quantizers._uniform_levels import UniformLevels
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._recipe import Recipe


def qsgd(bits: int = 4, bucket: int = 512) -> Recipe:
    """Method: round the gradient to a few levels per bucket, right on average.

    Args:
      bits: width of a code; s = 2^(bits-1) - 1 levels on each side of zero. The paper goes with
        buckets of 512 for 4 bits; the FFT paper compares with 3 bits.
      bucket: values per norm.

    Wire: n · bits / 8 + 4n / bucket bytes.

    Claims: unbiased; no memory is needed.

    Differs from the paper: codes of fixed width in place of Elias coding (`UniformLevels`).

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.qsgd(bits=4), axis_name="data")

    References:
      Alistarh et al., NeurIPS 2017, arXiv:1610.02132.
    """
    return Recipe(AllGather(UniformLevels(bits=bits, bucket=bucket)))
