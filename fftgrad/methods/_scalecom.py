"""ScaleCom: cyclic local top-k with low-pass error feedback."""

import math
from collections.abc import Mapping

from fftgrad._contracts import Codec, Exchange, Like
from fftgrad._values import value
from fftgrad.codecs._chain import chain
from fftgrad.codecs.selectors._chunk_top_k import ChunkTopK
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._scheduled import Scheduled
from fftgrad.exchanges._shared_support import SharedSupport
from fftgrad.memories._error_feedback import ErrorFeedback


@value
class ScaleComRule:
    """Function: the chunk of each leaf."""

    chunk: int
    flops: tuple[tuple[str, float], ...] = ()
    dense: tuple[str, ...] = ()
    transform: Codec = Identity()
    exact: bool = False

    def __call__(self, name: str, like: Like) -> Codec:
        n, chunk = math.prod(like.shape), self._chunk(name)
        if n <= chunk or any(word in name for word in self.dense):
            return Identity()
        return chain(self.transform, TopK(fraction=1 / chunk) if self.exact else ChunkTopK(chunk))

    def _chunk(self, name: str) -> int:
        """By the work of a gradient's element: the more, the less its exchange weighs."""
        for word, flops in self.flops:
            if word in name:
                return 25 if flops >= 196 else 50 if flops >= 128 else 400
        return self.chunk


def scalecom(
    chunk: int = 100,
    uptake: float = 1.0,
    *,
    flops: Mapping[str, float] | None = None,
    dense: tuple[str, ...] = (),
    transform: Codec = Identity(),
    exact: bool = False,
    warm_up_steps: int = 0,
) -> Recipe:
    """Method: one worker in turn chooses the coefficients of all, summed by an all-reduce.

        p_i = m_i + g_i,   I = the largest of p_leader in each chunk, leader = t mod w
        send p_i at I;     m_i' = m_i + u (g_i - sent_i);     apply mean sent.

    Args:
      chunk: values for each one sent, which is the largest of them.
      uptake: u, the paper's beta: share of the error that the residual takes up; 0.1 for large
        batches, 1 for the usual.
      flops: {word in a leaf's path: floating-point operations a gradient element of it costs}; such
        a leaf has the paper's chunk, 25 from 196 on, 50 from 128 on, else 400.
      dense: words in the paths of leaves that travel dense; the paper leaves the first layer out.
      transform: a linear transform before the choice, for example `Fft(block=64)`: the support is
        then shared in the frequency domain, which the paper does not do.
      exact: whether to take the k largest of the leaf instead, with Elias-Fano indices.
      warm_up_steps: for how many steps everything travels dense; the paper takes 1 to 5 epochs.

    Wire: n / chunk · (32 + log2(chunk)) bits, whatever the number of workers.

    Claims: for any uptake nothing is lost (`ErrorFeedback`).

    Differs from the paper: leaves that are no longer than a chunk travel dense. Chunks by FLOPs are
      those of 32 samples a worker, scaling with the batch is left to the caller's numbers.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.scalecom(chunk=100, uptake=0.1), axis_name="data")

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125.
    """
    rule = ScaleComRule(chunk, tuple((flops or {}).items()), dense, transform, exact)
    exchange: Exchange = SharedSupport(rule)
    if warm_up_steps:
        exchange = Scheduled({0: AllReduce(), warm_up_steps: exchange})
    return Recipe(exchange, ErrorFeedback(uptake=uptake))
