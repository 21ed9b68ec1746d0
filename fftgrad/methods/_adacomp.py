"""AdaComp."""

from fftgrad._contracts import Codec, Like
from fftgrad._values import value
from fftgrad.codecs.selectors._ada_comp import AdaComp
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


@value
class AdaCompRule:
    """Function: the bins of convolutions (more than two axes) and of other leaves."""

    conv_bin: int
    bin_size: int
    per_bin: float

    def __call__(self, name: str, like: Like) -> Codec:
        size = self.conv_bin if len(like.shape) > 2 else self.bin_size
        return AdaComp(bin_size=size, per_bin=min(self.per_bin, size))


def adacomp(conv_bin: int = 50, bin_size: int = 500, per_bin: float = 4.0) -> Recipe:
    """Method: in each bin, send what would exceed its maximum if the last gradient came again.

    Args:
      conv_bin: values per bin of leaves with more than two axes.
      bin_size: values per bin of all others.
      per_bin: how many values a bin has room for in the message, on average; see `AdaComp`.

    Wire: for bins of 500 and room for 4: 0.08 bits a value; for bins of 50, 0.53.

    Claims: nothing is lost: what is not sent, or sent rounded, stays in the residual.

    Differs from the paper: a message of fixed capacity; see `AdaComp`.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.adacomp(), axis_name="data")

    References:
      Chen et al., AAAI 2018, arXiv:1712.02679.
    """
    return Recipe(AllGather(AdaCompRule(conv_bin, bin_size, per_bin)), ErrorFeedback())
