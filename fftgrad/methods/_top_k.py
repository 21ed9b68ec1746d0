"""Top-k sparsification with error feedback."""

import jax
import optax

from fftgrad import _tree
from fftgrad._base import AxisName, Codec, Memory
from fftgrad._chain import chain
from fftgrad._pmean import compressed_pmean
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.quantizers._range_float import RangeFloat
from fftgrad.selectors._top_k import TopK
from fftgrad.transforms._identity import Identity


def top_k(
    density: float = 0.01,
    bits: int | None = None,
    *,
    transform: Codec = Identity(),
    memory: Memory = ErrorFeedback(),
    scope: _tree.Scope = "model",
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: send the largest values of the gradient, keep the rest for later.

        a = e + g,   s = the k largest of a,   e' = a - s,   apply mean s.

    Args:
      density: share of the values sent, k = ceil(density · n).
      bits: width of a value sent, by `RangeFloat`; None sends float32, as the papers do.
      transform: a linear transform before the selection, such as `Dct(block=64)`.
      memory: what is done with the rest; the paper's feedback, without decay.
      scope: what k is counted over: "model", "leaf", or a function that names groups.
      axis_name: the axis of the workers.
      key: seed or PRNG key, handed to `compressed_pmean`; this method draws nothing.

    Returns:
      An optax transformation, to be chained before an optimizer without momentum.

    Wire: k (32 + 2 + floor(log2(1/density))) bits, or `bits` in place of 32: the customary
      float32 and int32 take 64 k.

    Claims: Σ mean applied + mean residual = Σ mean gradient, without decay.

    Differs from the paper: indices in Elias-Fano code.

    Raises:
      ValueError: if an argument is outside its part's range.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = optax.chain(fg.methods.top_k(density=0.01), optax.sgd(0.1))

    References:
      Aji and Heafield, EMNLP 2017, arXiv:1704.05021. Stich et al., NeurIPS 2018, arXiv:1809.07599.
    """
    sparse = chain(transform, TopK(fraction=density))
    codec = sparse if bits is None else chain(sparse, RangeFloat(bits=bits))
    return compressed_pmean(AllGather(codec), memory, axis_name=axis_name, scope=scope, key=key)
