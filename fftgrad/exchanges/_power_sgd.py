"""A low-rank mean, by one step of a power iteration."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Channel, Exchange, PyTree, Reduced, Scope, State
from fftgrad._values import check_count, value
from fftgrad.exchanges import _low_rank


class PowerSgdState(NamedTuple):
    """State: the right factor of each matrix, equal on all workers."""

    factors: list[jax.Array]


@value
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

    Shapes: x float32[...], or a tuple of parts -> mean, error of the same shapes.

    Wire: 4 (n + m) · rank bytes a matrix, 4n for what stays dense, whatever the number of workers.

    Claims: all workers get the same bits. What counts as sent is the mean, as in
      the authors' code, so the residuals of the workers add up to what is missing from it. A matrix
      of zeros gives zeros, and the factors recover from it.

    Differs from the paper: P is made orthonormal by Householder reflections in place of
      Gram-Schmidt, which divides by zero where a column vanishes.

    Raises:
      ValueError: if `rank` is not positive.

    Example:
      >>> exchange = fg.PowerSgd(rank=1)
      >>> x = jnp.outer(jnp.arange(4.0), jnp.arange(5.0))[None]
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Channel("data")).mean
      >>> bool(jnp.allclose(jax.vmap(mean, axis_name="data")(x), x, atol=1e-5))
      True

    References:
      Vogels, Karimireddy and Jaggi, NeurIPS 2019, arXiv:1905.13727.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        check_count("PowerSgd(rank)", self.rank, "use rank=2.")

    @property
    def scope(self) -> Scope:
        return "leaf"

    def init(self, like: PyTree) -> State:
        return State(shared=PowerSgdState(_low_rank.random_factors(like, self.rank, axis=1)))

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        leaves, structure = jax.tree.flatten(x)
        factors = state.shared.factors
        matrices, dense = _low_rank.split(leaves, self.rank)
        lefts, rights, exact = _low_rank.iterate(matrices, factors, dense, channel)
        low_rank = list(map(_low_rank.product, lefts, rights))
        means, sent = (
            jax.tree.unflatten(structure, _low_rank.join(leaves, low_rank, others, self.rank))
            for others in (exact, dense)
        )
        kept = PowerSgdState(list(map(_low_rank.kept, rights, factors)))
        return Reduced(means, jax.tree.map(jnp.subtract, x, sent), State(shared=kept))

    def wire_bytes(self, like: PyTree) -> int:
        factors = self.rank * sum(map(sum, _low_rank.shapes(like, self.rank)))
        return 4 * (factors + _low_rank.dense_size(like, self.rank))
