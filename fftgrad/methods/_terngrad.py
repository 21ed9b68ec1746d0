"""TernGrad."""

from fftgrad._contracts import Exchange
from fftgrad.codecs.quantizers._ternary import Ternary
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._integer_sum import IntegerSum
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._rules import DenseByName


def terngrad(
    clip: float | None = 2.5, *, dense: tuple[str, ...] = (), workers: int | None = None
) -> Recipe:
    """Method: -s, 0 or s for each value of a layer, right on average.

    Args:
      clip: bound of the values, in standard deviations of the layer; None does not clip, and then
        the method is unbiased.
      dense: words in the paths of leaves that are not quantized; the paper leaves the last
        classification layer out.
      workers: if given, the scale is shared, and the ternaries of that many workers are summed on
        the way (`IntegerSum`); `dense` must then be empty.

    Wire: 1.6 bits a value and 4 bytes a layer; with a shared scale 4.6 bits a value for 8 workers,
      in an all-reduce.

    Claims: unbiased without clipping.

    Differs from the paper: 1.6 bits where it takes 2; the scale of a clipped layer is its largest
      magnitude (`Ternary`).

    Raises:
      ValueError: if both `dense` and `workers` are given.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.terngrad(dense=("head",)), axis_name="data")

    References:
      Wen et al., NeurIPS 2017, arXiv:1705.07878.
    """
    if workers is not None and dense:
        raise ValueError(
            f"terngrad(dense): must be empty where integers are summed, got {dense}; leave workers "
            "out, or keep those leaves out with optax.partition."
        )
    exchange: Exchange = AllGather(DenseByName(dense, Ternary(clip=clip)))
    if workers is not None:
        exchange = IntegerSum(workers=workers, clip=clip)
    return Recipe(exchange, layout=Layout("leaf"))
