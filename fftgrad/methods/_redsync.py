"""RedSync: residual gradient compression."""

import math

from fftgrad._contracts import Codec, Exchange, Like
from fftgrad._values import value
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers._sign import MeanMagnitude
from fftgrad.codecs.selectors._alternating_sign import AlternatingSign
from fftgrad.codecs.selectors._threshold import Threshold
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._scheduled import Scheduled
from fftgrad.memories._momentum_correction import MomentumCorrection


@value
class RedSyncRule:
    """Function: dense, trimmed top-k or threshold search, by the bytes of a leaf."""

    fraction: float
    quantize: bool = False
    output: tuple[str, ...] = ()
    dense_below: int = 128 * 1024
    trimmed_below: int = 4 * 1024 * 1024
    reuse: int = 5

    def __call__(self, name: str, like: Like) -> Codec:
        size = 4 * math.prod(like.shape)
        if size < self.dense_below:
            return Identity()
        small = size < self.trimmed_below
        if self.quantize and not any(word in name for word in self.output):
            # A threshold found for one sign does not serve the other, so none is reused.
            search = "exact" if small else "binary"
            return chain(AlternatingSign(), Threshold(self.fraction, search), MeanMagnitude())
        if small:
            return TopK(fraction=self.fraction)
        return Threshold(self.fraction, reuse=self.reuse)


def redsync(
    fraction: float = 0.001,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    quantize: bool = False,
    output: tuple[str, ...] = (),
    dense_below: int = 128 * 1024,
    trimmed_below: int = 4 * 1024 * 1024,
    reuse: int = 5,
    warm_up_steps: int = 0,
) -> Recipe:
    """Method: residual gradient compression, with a selection that suits the size of each layer.

    What is sent of a layer follows from its bytes:

        below 128 KB     all
        to 4 MB          the k largest: `TopK`
        above            k to 2k values above a threshold, which is found by binary search and
                         serves for 5 steps: `Threshold(reuse=5)`

    Quantized, only values of one sign are selected, another sign each step, and one mean stands for
    all of them: `AlternatingSign`, `Threshold` (exact below 4 MB), `MeanMagnitude`. The output
    layer keeps its values.

    Args:
      fraction: share of each layer that is sent; the paper's 0.1 %.
      momentum: of `MomentumCorrection`; the optimizer behind must have none.
      nesterov: whether it is Nesterov's.
      quantize: whether to send one mean in place of values.
      output: words in the paths of the output layer's leaves, which are not quantized.
      dense_below: bytes below which a layer travels dense.
      trimmed_below: bytes below which a layer is selected by top-k.
      reuse: for how many steps a threshold serves.
      warm_up_steps: for how many steps everything travels dense, in an all-reduce: the paper found
        this faster than a warm-up at higher densities.

    Returns:
      A `Recipe`, for an optimizer without momentum. The paper clips each worker's gradient before:
      `fg.training.clip_by_local_norm(max_norm / workers**0.5)` in front of `compressed_pmean`.

    Wire: one message for all layers, which is gathered, dense layers too: where these are most of
      the model, a dense all-reduce sends less (`fg.link_bytes`). Top-k: 34 + log2(1/fraction)
      bits a value. Threshold: a message of fixed capacity 2k that carries its true length; what
      more passes stays in the residual and is counted (`CompressedPmeanState.overflow`). Quantized:
      positions and 4 bytes a layer.

    Claims: without clipping, what is not sent stays in v.

    Differs from the paper: a threshold that more than 2k pass is searched for again before its
      time; sparse gradients keep their velocity, and what the mean in place of a value takes from
      it stays in the residual (`MomentumCorrection`). Its full text was not at hand: sizes, reuse
      and alternation of signs follow its abstract and published code by others.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.redsync(fraction=0.001), axis_name="data")

    References:
      Fang, Fu, Yang and Hsieh, JPDC 133, 2019, arXiv:1808.04357.
    """
    rule = RedSyncRule(fraction, quantize, output, dense_below, trimmed_below, reuse)
    exchange: Exchange = AllGather(rule)
    if warm_up_steps:
        exchange = Scheduled({0: AllReduce(), warm_up_steps: exchange})
    return Recipe(exchange, MomentumCorrection(momentum, nesterov))
