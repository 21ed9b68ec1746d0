"""Top-k sparsification with error feedback."""

from fftgrad._contracts import Codec, Memory
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers._log_levels import LogLevels
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


def top_k(
    fraction: float = 0.01,
    bits: int | None = None,
    *,
    transform: Codec = Identity(),
    memory: Memory = ErrorFeedback(),
) -> Recipe:
    """Method: send the largest values of the gradient, keep the rest for later.

        a = e + g,   s = the k largest of a,   e' = a - s,   apply mean s.

    Args:
      fraction: share of the values sent, k = ceil(fraction · n).
      bits: width of a value sent, by `LogLevels`; None sends float32, as the papers do.
      transform: a linear transform before the selection, such as `Dct(block=64)`.
      memory: what is done with the rest; the paper's feedback, without decay.

    Wire: k (32 + 2 + floor(log2(1/fraction))) bits, or `bits` in place of 32: the customary
      float32 and int32 take 64 k.

    Claims: Σ mean applied + mean residual = Σ mean gradient, without decay.

    Differs from the paper: indices in Elias-Fano code.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.top_k(fraction=0.01), axis_name="data")

    References:
      Aji and Heafield, EMNLP 2017, arXiv:1704.05021. Stich et al., NeurIPS 2018, arXiv:1809.07599.
    """
    sparse = chain(transform, TopK(fraction=fraction))
    codec = sparse if bits is None else chain(sparse, LogLevels(bits=bits))
    return Recipe(AllGather(codec), memory)
