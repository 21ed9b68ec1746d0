"""Published methods as recipes, one function each.

The docstrings of codecs and exchanges list their own differences from the papers. Each recipe is
used as in `tx = fg.compressed_pmean(fg.methods.top_k(fraction=0.01), axis_name="data")`.
"""

import math
from collections.abc import Sequence

from fftgrad import codecs, exchanges
from fftgrad._contracts import Codec, Like, Memory
from fftgrad._values import check, check_count, value
from fftgrad.codecs import ChunkTopK, Dct, Identity, Threshold, Tiles, TopK, chain
from fftgrad.exchanges import AllGather, AllReduce, Bucketing, LeaderTopK, Recipe, Scheduled
from fftgrad.exchanges._parts import DenseByName
from fftgrad.memories import ErrorFeedback, MomentumCorrection


def acp_sgd(rank: int = 4) -> Recipe:
    """Method: send one of two thin factors of each matrix per step, in turn, with error feedback.

    Args:
      rank: columns of a factor; the paper uses 4 for ResNets and 32 for BERT.

    Wire: about 2 · rank · (rows + columns) bytes per matrix, 4 per dense value, in one all-reduce.

    References:
      Zhang et al., ICDCS 2023, arXiv:2306.08881.
    """
    return Recipe(exchanges.AcpSgd(rank), ErrorFeedback())


@value
class AdaCompRule:
    conv_bin: int
    bin_size: int
    per_bin: float

    def __call__(self, name: str, like: Like) -> Codec:
        size = self.conv_bin if len(like.shape) > 2 else self.bin_size
        return codecs.AdaComp(bin_size=size, per_bin=min(self.per_bin, size))


def adacomp(conv_bin: int = 50, bin_size: int = 500, per_bin: float = 4.0) -> Recipe:
    """Method: send values that would exceed their bin's maximum if the gradient came once more.

    Args:
      conv_bin: values per bin of leaves with more than two axes.
      bin_size: values per bin of all other leaves.
      per_bin: capacity of the message, in values per bin on average; see `AdaComp`.

    Wire: with the default capacity, 0.08 bits per value for bins of 500, and 0.53 for bins of 50.

    References:
      Chen et al., AAAI 2018, arXiv:1712.02679.
    """
    return Recipe(AllGather(AdaCompRule(conv_bin, bin_size, per_bin)), ErrorFeedback())


@value
class LargestOfTiles:
    """Rule: the k largest values, or DCT coefficients, of each tile of a leaf."""

    transform: type[Dct] | type[Tiles]
    k: int
    block: int
    quantizer: Codec = Identity()

    def __post_init__(self) -> None:
        check_count("LargestOfTiles(k)", self.k, "use k=32.")
        self.transform(self.block)

    def __call__(self, name: str, like: Like) -> Codec:
        rows, columns = math.prod(like.shape[:-1]), math.prod(like.shape[-1:])
        transform = self.transform(self.block, shape=(rows, columns))
        chunk = max(2, transform.tile_size)
        return chain(transform, ChunkTopK(chunk, min(self.k, chunk)), self.quantizer)


def demo(k: int = 32, block: int = 64, decay: float = 0.999) -> Recipe:
    """Method: send the largest DCT coefficients of each worker's momentum, for sign descent.

    With D the momentum of a worker, and IDCT the inverse DCT,

        D = decay · D + g,   C = DCT of D by tiles,   q = the k largest C of each tile,
        D = D - IDCT(q),     update = sign(IDCT(mean q)).

    The momentum D is the residual of error feedback with decay, so it differs between the workers.

    Args:
      k: coefficients sent per tile; the authors' runs use 32 of 4096, or 8 for 85x fewer bytes.
      block: largest side of a tile; a leaf with one axis has tiles of `block` values.
      decay: decay of the momentum per step.

    Returns:
      A `Recipe`. Chain `optax.scale_by_sign()` and `optax.scale(-rate)` after `compressed_pmean`.

    Wire: for k = 32, k (32 + 9) bits per tile of 4096; the authors' code sends 96 k bits.

    Differs from the paper: the mean is over all workers; the authors' code divides by the number of
      workers that sent a coefficient. Axes are padded to whole tiles. The momentum does not include
      the learning rate, which makes no difference to sign descent at a constant rate.

    References:
      Peng, Quesnelle and Kingma, 2024, arXiv:2411.19870.
    """
    return Recipe(AllGather(LargestOfTiles(Dct, k, block)), ErrorFeedback(decay))


@value
class DgcRule:
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
    """Method: top-k of each layer, with momentum correction, masking and warm-up.

    Args:
      fraction: share of each layer that is sent after the warm-up.
      momentum: momentum of `MomentumCorrection`. It replaces the optimizer's momentum.
      nesterov: True for Nesterov's momentum.
      warm_up: shares during the warm-up, each for an equal number of steps.
      warm_up_steps: length of the warm-up, four epochs in the paper; 0 for no warm-up.

    Returns:
      A `Recipe`, for an optimizer without momentum. The paper clips each worker's gradient first:
      put `fg.training.clip_by_local_norm(max_norm / workers**0.5)` before `compressed_pmean`.

    Wire: fraction · n (34 + log2(1/fraction)) bits; 4 bytes per value of leaves with one axis.

    Differs from the paper: a leaf whose non-zero values are all sent keeps its velocity. Selection
      is exact; the paper estimates the threshold from a sample. The optimizer applies the weight
      decay. Leaves with one axis are sent uncompressed in the same collective.

    References:
      Lin et al., ICLR 2018, arXiv:1712.01887.
    """
    exchange = AllGather(DgcRule(fraction))
    if warm_up_steps:
        starts = [round(i * warm_up_steps / len(warm_up)) for i in range(len(warm_up))]
        stages = zip([*starts, warm_up_steps], [*warm_up, fraction], strict=True)
        exchange = Scheduled({start: AllGather(DgcRule(share)) for start, share in stages})
    return Recipe(exchange, MomentumCorrection(momentum, nesterov))


def eden(bits: int = 1, block: int = 4096) -> Recipe:
    """Method: rotate at random, round to the best levels for a normal distribution, and rescale.

    Args:
      bits: bits per value, 1 to 6; with 1 it is DRIVE.
      block: number of values rotated together, a power of two.

    Wire: n · bits / 8 + 4n / block bytes for n values.

    Differs from the paper: blocks are rotated instead of whole vectors. All workers use the same
      rotation, so one inverse rotation is enough. Errors of similar gradients then cancel less.

    References:
      Vargaftik et al., NeurIPS 2021, arXiv:2105.08339; ICML 2022, arXiv:2108.08842.
    """
    return Recipe(AllGather(chain(codecs.Hadamard(block), codecs.LloydMax(bits, block))))


def power_sgd(rank: int = 2) -> Recipe:
    """Method: two thin factors of each matrix, with error feedback.

    Args:
      rank: columns of a factor.

    Wire: 4 · rank · (rows + columns) bytes per matrix, 4 per dense value, in two all-reduces.

    References:
      Vogels et al., NeurIPS 2019, arXiv:1905.13727.
    """
    return Recipe(exchanges.PowerSgd(rank), ErrorFeedback())


def qsgd(bits: int = 4, bucket: int = 512) -> Recipe:
    """Method: unbiased rounding to a few levels between minus and plus the norm of each bucket.

    Args:
      bits: bits per value, for 2^(bits-1) - 1 levels on each side of zero. The paper uses buckets
        of 512 with 4 bits; the FFT paper compares with 3 bits.
      bucket: number of values that share a norm.

    Wire: n · bits / 8 + 4n / bucket bytes for n values.

    Claims: unbiased.

    References:
      Alistarh et al., NeurIPS 2017, arXiv:1610.02132.
    """
    return Recipe(AllGather(codecs.UniformQuantizer(bits=bits, bucket=bucket)))


def random_k(fraction: float = 0.01) -> Recipe:
    """Method: values at random positions, the same on all workers, with error feedback.

    Args:
      fraction: share of the values sent, k = ceil(fraction · n).

    Wire: 4k bytes in one all-reduce; no positions are sent.

    References:
      Stich et al., NeurIPS 2018, arXiv:1809.07599.
    """
    return Recipe(AllReduce(codecs.RandomK(fraction=fraction)), ErrorFeedback())


@value
class RedSyncRule:
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
            # No reuse, because the next step needs a threshold for the other sign.
            search = "exact" if small else "binary"
            return chain(
                codecs.AlternatingSign(), Threshold(self.fraction, search), codecs.MeanMagnitude()
            )
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
) -> Recipe:
    """Method: residual gradient compression, with a selection that suits the size of each layer.

        below 128 KiB    all values
        below 4 MiB      the k largest: `TopK`
        others           k to 2k values above a threshold, found by binary search and
                         used for 5 steps: `Threshold(reuse=5)`

    With `quantize`, steps select positive and negative values in turn, and send the mean of the
    selected values instead of each: `AlternatingSign`, `Threshold`, `MeanMagnitude`.

    Args:
      fraction: share of each layer that is sent; the default is the paper's.
      momentum: momentum of `MomentumCorrection`. It replaces the optimizer's momentum.
      nesterov: True for Nesterov's momentum.
      quantize: True to send the mean of the selected values.
      output: words in the paths of the output layer's leaves, which are not quantized.
      dense_below: bytes below which a layer is not compressed.
      trimmed_below: bytes below which top-k selects the values of a layer.
      reuse: number of steps that use the same threshold.

    Returns:
      A `Recipe`, for an optimizer without momentum. The paper clips gradients first, as for `dgc`.

    Wire: one all-gather for all layers. Top-k: 34 + log2(1/fraction) bits per value sent.
      Threshold: a message with room for 2k values, which includes the actual number. Values beyond
      2k stay in the residual, and `CompressedPmeanState.overflow` counts them. Quantized: positions
      and 4 bytes per layer. If most layers are small, a dense all-reduce may send less.

    Differs from the paper: if more than 2k values exceed a reused threshold, a new one is searched.
      Sparse gradients keep their velocity, and the error of the mean stays in the residual
      (`MomentumCorrection`). The full text was not available: sizes, reuse and alternating signs
      follow the abstract and code that others published.

    References:
      Fang, Fu, Yang and Hsieh, JPDC 133, 2019, arXiv:1808.04357.
    """
    rule = RedSyncRule(fraction, quantize, output, dense_below, trimmed_below, reuse)
    return Recipe(AllGather(rule), MomentumCorrection(momentum, nesterov))


@value
class ScaleComRule:
    chunk: int
    dense: tuple[str, ...] = ()

    def __call__(self, name: str, like: Like) -> Codec:
        keep = math.prod(like.shape) <= self.chunk or any(word in name for word in self.dense)
        return Identity() if keep else ChunkTopK(self.chunk)


def scalecom(chunk: int = 100, beta: float = 1.0, *, dense: tuple[str, ...] = ()) -> Recipe:
    """Method: the workers take turns to choose the positions of the values that all workers send.

    In step t, worker i has the gradient g_i and the residual m_i. The leader is worker t mod w:

        p_i = m_i + g_i,   I = the largest of p_leader in each chunk,
        send p_i at I;     m_i' = m_i + beta (g_i - sent_i);     apply mean sent.

    Args:
      chunk: number of values per chunk, of which the leader chooses the largest.
      beta: weight of a step's error in the residual; use 0.1 for large batches, else 1.
      dense: words in the paths of leaves that are not compressed; in the paper, the first layer.

    Wire: n / chunk · (32 + log2(chunk)) bits for n values, in all-reduces.

    Differs from the paper: leaves no longer than a chunk are not compressed. All leaves have
      one chunk; in the paper, layers with more operations per value have shorter chunks.

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125.
    """
    return Recipe(LeaderTopK(ScaleComRule(chunk, dense)), ErrorFeedback(beta=beta))


def sign_sgd() -> Recipe:
    """Method: send signs and one mean magnitude, with error feedback.

    For each leaf of d values, with residual e and gradient g,

        p = e + g,   Δ = (||p||₁ / d) sign(p),   e' = p - Δ,   apply mean Δ.

    Wire: 1 bit per value and 4 bytes per leaf.

    Differs from the paper: the residual does not include the learning rate; the paper has
      p = lr · g + e. If the learning rate falls, the residual is applied at the new rate.

    References:
      Karimireddy et al., ICML 2019, arXiv:1901.09847.
    """
    return Recipe(AllGather(codecs.Sign()), ErrorFeedback(), Bucketing("leaf"))


def terngrad(
    clip: float | None = 2.5, *, dense: tuple[str, ...] = (), workers: int | None = None
) -> Recipe:
    """Method: unbiased rounding of each value of a layer to -s, 0 or s.

    Args:
      clip: bound of the values, in standard deviations of the layer; None does not clip.
      dense: words in the paths of leaves that are not quantized; in the paper, the last layer.
      workers: number of workers, to use one scale for all workers and add the codes in an
        all-reduce (`QuantizedAllReduce`); `dense` must then be empty. None for an all-gather.

    Wire: 1.6 bits per value and 4 bytes per layer; with `workers=8`, 4.6 bits per value.

    Claims: unbiased without clipping.

    References:
      Wen et al., NeurIPS 2017, arXiv:1705.07878.
    """
    if workers is None:
        exchange = AllGather(DenseByName(dense, codecs.Ternary(clip=clip)))
    else:
        rule = "be empty if workers is given"
        check(not dense, "terngrad(dense)", rule, dense, "leave one out.")
        exchange = exchanges.QuantizedAllReduce(workers=workers, clip=clip)
    return Recipe(exchange, bucketing=Bucketing("leaf"))


def top_k(
    fraction: float = 0.01,
    bits: int | None = None,
    *,
    transform: Codec = Identity(),
    memory: Memory = ErrorFeedback(),
) -> Recipe:
    """Method: send the largest values of the gradient g plus the residual e.

        a = e + g,   s = the k largest of a,   e' = a - s,   apply mean s.

    Args:
      fraction: share of the n values sent, k = ceil(fraction · n).
      bits: bits per value sent, by `LogQuantizer`; None sends float32, as in the papers.
      transform: a linear transform before the selection, such as `Dct(block=64)`.
      memory: the memory of unsent values. The default is the papers', without decay.

    Wire: k (32 + 2 + log2(1/fraction)) bits, with `bits` in place of 32 if given.

    References:
      Aji and Heafield, EMNLP 2017, arXiv:1704.05021. Stich et al., NeurIPS 2018, arXiv:1809.07599.
    """
    sparse = chain(transform, TopK(fraction=fraction))
    codec = sparse if bits is None else chain(sparse, codecs.LogQuantizer(bits=bits))
    return Recipe(AllGather(codec), memory)
