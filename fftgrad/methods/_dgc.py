"""Deep gradient compression."""

from collections.abc import Sequence

from fftgrad._contracts import Codec, Like
from fftgrad._values import value
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._scheduled import Scheduled
from fftgrad.memories._momentum_correction import MomentumCorrection


@value
class DgcRule:
    """Function: top-k of each leaf with more than one axis; the others dense."""

    fraction: float

    def __call__(self, name: str, like: Like) -> Codec:
        return TopK(fraction=self.fraction) if len(like.shape) > 1 else Identity()


def dgc(
    fraction: float = 0.001,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    warm_up: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004),
    warm_up_steps: int = 0,
) -> Recipe:
    """Method: top-k of each layer, with momentum correction, masking, clipping and warm-up.

    Args:
      fraction: share of each layer that is sent, in the end.
      momentum: of `MomentumCorrection`; the optimizer behind must have none.
      nesterov: whether it is Nesterov's.
      warm_up: densities before that, each for an equal part of the warm-up.
      warm_up_steps: length of the warm-up, four epochs in the paper; 0 for none.

    Returns:
      A `Recipe`, for an optimizer without momentum. The paper clips each worker's gradient before:
      `fg.training.clip_by_local_norm(max_norm / workers**0.5)` in front of `compressed_pmean`.

    Wire: fraction · n (34 + log2(1/fraction)) bits, and 4 bytes for each value of leaves of one
      axis.

    Claims: without clipping, what is not sent stays in v.

    Differs from the paper: sparse gradients keep their velocity (`MomentumCorrection`); exact
      selection, where it takes the threshold of a sample; weight decay is the optimizer's business;
      leaves of one axis travel dense in the same collective.

    Example:
      >>> method = fg.methods.dgc(fraction=0.01, warm_up_steps=400)
      >>> tx = fg.compressed_pmean(method, axis_name="data")

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887.
    """
    exchange = AllGather(DgcRule(fraction))
    if warm_up_steps:
        starts = [round(i * warm_up_steps / len(warm_up)) for i in range(len(warm_up))]
        stages = zip([*starts, warm_up_steps], [*warm_up, fraction], strict=True)
        exchange = Scheduled({start: AllGather(DgcRule(share)) for start, share in stages})
    return Recipe(exchange, MomentumCorrection(momentum, nesterov))
