"""FFT-based gradient sparsification."""

from collections.abc import Mapping, Sequence

from fftgrad._contracts import Exchange, Memory
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers._range_float import RangeFloat
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.codecs.transforms._fft import Fft
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._ladder import Ladder
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._scheduled import Scheduled
from fftgrad.memories._error_feedback import NoMemory


def fft_sparsification(
    theta: float = 0.85,
    bits: int = 10,
    block: int | None = None,
    theta_schedule: Mapping[int, float] | None = None,
    recover: Sequence[float] = (),
    *,
    memory: Memory = NoMemory(),
) -> Recipe:
    """Method: keep the largest frequencies of the gradient, in few bits each.

    The paper's symbols, and what stands for them here:

        g, linearized           all leaves as one float32 vector      compressed_pmean
        cast to fp16            rounded before the transform          Fft(half=True)
        FFT of g                one real transform of the vector      Fft(block=None)
        θ, dropped share        the smallest θ of the moduli          TopK(fraction=1 - theta)
        N, m, eps, min, max     range-based N-bit float               RangeFloat(bits)
        status, bitmap, pack    indices in Elias-Fano or bitmap       TopK
        allgather, average      one collective, one inverse FFT       AllGather
        no error feedback       what is dropped is lost               NoMemory()
        diminishing θ           another θ from given steps on         Scheduled
        recovery                a smaller θ when it is needed         Ladder

    Args:
      theta: share of the frequencies dropped, 0 <= theta < 1; the paper's runs use 0.85.
      bits: N of the range-based float; the paper's runs use 10.
      block: length of the blocks transformed; None is the paper's, the whole gradient. Blocks of
        64 to 256 keep the energy's place, and lose less of most gradients.
      theta_schedule: {first step: theta} that takes over from `theta` at those steps, for example
        {0: 0.9, 20_000: 0.0}; theta 0 is a dense all-reduce. `diminishing_theta` makes
        one from the learning rate.
      recover: thetas to fall back to, in this order, for example (0.5, 0.0), without recompiling:
        by the loss with `recover_by_loss`, or where you call `fg.exchanges.next_level`. Not
        together with `theta_schedule`.
      memory: the paper has none; `ErrorFeedback()` keeps what is dropped.

    Wire: for n parameters, k = (1 - θ) n/2 complex coefficients of 2N bits, with about
      2 + log2(1/(1 - θ)) bits for the index of each: 1.85 bits a parameter at θ = 0.85, N = 10.

    Claims: biased; no bound on training. The paper's convergence proof takes θ for the relative
      L2 error of the mean, and asks θ² <= 1/4.

    Differs from the paper: nearest rounding and a range fitted to each payload (the paper
      truncates, in [-1, 1]); Elias-Fano indices where smaller than a bitmap; exact selection;
      no broadcast of the parameters every 10 steps, because replicas are bit-identical; θ = 0 is
      a dense all-reduce.

    Raises:
      ValueError: if both `theta_schedule` and `recover` are given.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.fft_sparsification(theta=0.85), axis_name="data")

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    def exchange(theta: float) -> Exchange:
        if not 0 <= theta < 1:
            raise ValueError(
                f"fft_sparsification(theta): the share dropped must be in [0, 1), got {theta}; "
                "the paper uses 0.85."
            )
        if theta == 0:
            return AllReduce()
        fft = Fft(block=block, half=True)
        return AllGather(chain(fft, TopK(fraction=1.0 - theta), RangeFloat(bits=bits)))

    if recover and theta_schedule is not None:
        raise ValueError(
            "fft_sparsification(theta_schedule, recover): only one may be given, got "
            f"{theta_schedule} and {tuple(recover)}; steps or need decide, not both."
        )
    if recover:
        chosen = Ladder(tuple(map(exchange, (theta, *recover))))
    elif theta_schedule is not None:
        thetas = {0: theta, **theta_schedule}
        chosen = Scheduled({step: exchange(value) for step, value in thetas.items()})
    else:
        chosen = exchange(theta)
    return Recipe(chosen, memory)
