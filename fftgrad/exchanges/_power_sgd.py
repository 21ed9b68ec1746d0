"""A low-rank mean, by one step of a power iteration."""

import dataclasses
from typing import NamedTuple

import jax

from fftgrad._contracts import AxisName, Exchange, PyTree, Reduced, Scope, Step
from fftgrad.exchanges import _alike, _counts, _low_rank


class PowerSgdState(NamedTuple):
    """State: the right factor of each matrix, equal on all workers."""

    factors: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class PowerSgd(Exchange):
    """Exchange: the mean of each matrix as P Qᵀ, with two small all-reduces.

    For the matrices M_i of the workers, n × m, and the factor Q of the step before:

        P = orthonormal(mean M_i Q),   Q' = mean M_iᵀ P,   mean ≈ P Q'ᵀ.

    Q is kept from step to step, so that the iteration converges while the gradient moves slowly.
    Arrays of more axes become matrices with their last axis as columns; vectors, and what a
    factorization would not make smaller, travel dense in the first all-reduce. Its parts are the
    leaves, in their shapes. Use it with `ErrorFeedback()`.

    Args:
      rank: number of columns of P and Q.

    Shapes: x float32[...], or a tuple of parts -> mean, sent of the same shapes.

    Wire: 4 (n + m) · rank bytes a matrix, 4n for what stays dense, whatever the number of workers.

    Claims: all workers get the same bits. `sent` is the mean, as in the authors' code, so the
      residuals of the workers add up to what is missing from it. A matrix of zeros gives zeros,
      and the factors recover from it.

    Differs from the paper: P is made orthonormal by Householder reflections in place of
      Gram-Schmidt, which divides by zero where a column vanishes.

    Raises:
      ValueError: if `rank` is not positive.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> exchange = fg.PowerSgd(rank=1)
      >>> x = jnp.outer(jnp.arange(4.0), jnp.arange(5.0))[None]
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.Step(), "data").mean
      >>> bool(jnp.allclose(jax.vmap(mean, axis_name="data")(x), x, atol=1e-5))
      True

    References:
      Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
      Distributed Optimization", NeurIPS 2019, arXiv:1905.13727.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSgd(rank): must be at least 1, got {self.rank}; use rank=2.")

    @property
    def scope(self) -> Scope:
        return "leaf"

    def init(self, like: PyTree) -> PowerSgdState:
        return PowerSgdState(_low_rank.random_factors(like, self.rank, axis=1))

    def mean(self, x: PyTree, state: PowerSgdState, step: Step, axis_name: AxisName) -> Reduced:
        leaves, structure = jax.tree.flatten(x)
        matrices, dense = _low_rank.split(leaves, self.rank)
        who = _counts.term(step, axis_name)
        lefts, rights, averaged = _low_rank.iterate(
            matrices, state.factors, [*dense, *who], axis_name
        )
        low_rank = list(map(_low_rank.product, lefts, rights))
        workers = _counts.number(averaged[len(dense) :])
        received = _counts.over(workers, low_rank, axis_name)
        means = _low_rank.join(leaves, low_rank, averaged, self.rank)
        return Reduced(
            mean=jax.tree.unflatten(structure, means),
            sent=jax.tree.unflatten(structure, _low_rank.join(leaves, received, dense, self.rank)),
            finite=_alike.all_finite(means),
            overflow=0,
            state=PowerSgdState(list(map(_low_rank.kept, rights, state.factors))),
            workers=workers,
        )

    def wire_bytes(self, like: PyTree) -> int:
        factors = self.rank * sum(map(sum, _low_rank.shapes(like, self.rank)))
        return 4 * (factors + _low_rank.dense_size(like, self.rank))
