"""ScaleCom: cyclic local top-k with low-pass error feedback."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import optax

from fftgrad._base import AxisName, Codec, Exchange, Like
from fftgrad._chain import chain
from fftgrad._pmean import compressed_pmean
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._piecewise import Piecewise
from fftgrad.exchanges._shared_support import SharedSupport
from fftgrad.memories._low_pass import LowPass
from fftgrad.selectors._chunk_top_k import ChunkTopK
from fftgrad.selectors._top_k import TopK
from fftgrad.transforms._identity import Identity


@dataclasses.dataclass(frozen=True)
class ScaleComPolicy:
    """Rule: the rate of each leaf.

    Attributes are the arguments of `scalecom` of the same names.
    """

    rate: int
    flops: tuple[tuple[str, float], ...] = ()
    dense: tuple[str, ...] = ()
    transform: Codec = Identity()
    exact: bool = False

    def __call__(self, name: str, like: Like) -> Codec:
        n, rate = math.prod(like.shape), self._rate(name)
        if n <= rate or any(word in name for word in self.dense):
            return Identity()
        return chain(self.transform, TopK(fraction=1 / rate) if self.exact else ChunkTopK(rate))

    def _rate(self, name: str) -> int:
        """By the work of a gradient's element: the more, the less its exchange weighs."""
        for word, flops in self.flops:
            if word in name:
                return 25 if flops >= 196 else 50 if flops >= 128 else 400
        return self.rate


def scalecom(
    rate: int = 100,
    beta: float = 1.0,
    *,
    flops: Mapping[str, float] | None = None,
    dense: tuple[str, ...] = (),
    transform: Codec = Identity(),
    exact: bool = False,
    warm_up_steps: int = 0,
    axis_name: AxisName = "data",
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Method: one worker in turn chooses the coefficients of all, summed by an all-reduce.

        p_i = m_i + g_i,   I = the largest of p_leader in each chunk, leader = t mod w
        send p_i at I;     m_i' = m_i + beta (g_i - sent_i);     apply mean sent.

    Args:
      rate: values for each one sent: the largest of each chunk of that many.
      beta: share of the error that the residual takes up; 0.1 for large batches, 1 for the usual.
      flops: {word in a leaf's path: floating-point operations a gradient element of it costs}; such
        a leaf has the paper's rate, 25 from 196 on, 50 from 128 on, else 400.
      dense: words in the paths of leaves that travel dense; the paper leaves the first layer out.
      transform: a linear transform before the choice, for example `Fft(block=64)`: the support is
        then shared in the frequency domain, which the paper does not do.
      exact: whether to take the k largest of the leaf instead, with Elias-Fano indices.
      warm_up_steps: for how many steps everything travels dense; the paper takes 1 to 5 epochs.
      axis_name: the axis of the workers.
      key: seed or PRNG key, handed to `compressed_pmean`; this method draws nothing.

    Returns:
      An optax transformation, to be chained before the optimizer.

    Wire: n / rate · (32 + log2(rate)) bits, whatever the number of workers.

    Claims: parameters equal on all workers; for any beta nothing is lost (`LowPass`).

    Differs from the paper: leaves that are no longer than a chunk travel dense. Rates by FLOPs are
      those of 32 samples a worker, scaling with the batch is left to the caller's numbers.

    Raises:
      ValueError: if an argument is outside its part's range.

    Example:
      >>> import fftgrad as fg
      >>> import optax
      >>> tx = optax.chain(fg.methods.scalecom(rate=100, beta=0.1), optax.sgd(0.1, momentum=0.9))

    References:
      Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
      Distributed Training", NeurIPS 2020, arXiv:2104.11125.
    """
    policy = ScaleComPolicy(rate, tuple((flops or {}).items()), dense, transform, exact)
    exchange: Exchange = SharedSupport(policy)
    if warm_up_steps:
        exchange = Piecewise({0: AllReduce(), warm_up_steps: exchange})
    return compressed_pmean(exchange, LowPass(beta), axis_name=axis_name, scope="leaf", key=key)
