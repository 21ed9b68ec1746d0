"""A low-rank mean, by one step of a power iteration."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, Like, PyTree, Reduced, Scope, Step
from fftgrad.exchanges import _alike, _counts, _parts


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
        return PowerSgdState(
            [
                jax.random.normal(jax.random.key(i), (shape[1], self.rank), jnp.float32)
                for i, shape in enumerate(map(self._matrix, jax.tree.leaves(like)))
                if shape is not None
            ]
        )

    def mean(self, x: PyTree, state: PowerSgdState, step: Step, axis_name: AxisName) -> Reduced:
        leaves, structure = jax.tree.flatten(x)
        shapes = list(map(self._matrix, leaves))
        matrices = [
            leaf.reshape(shape)
            for leaf, shape in zip(leaves, shapes, strict=True)
            if shape is not None
        ]
        dense = [leaf for leaf, shape in zip(leaves, shapes, strict=True) if shape is None]

        lefts = [_times(m, q) for m, q in zip(matrices, state.factors, strict=True)]
        who = _counts.term(step, axis_name)
        averaged = _mean([*lefts, *dense, *who], axis_name)
        lefts = [jnp.linalg.qr(left)[0] for left in averaged[: len(matrices)]]
        rights = _mean(
            [_times(m.T, left) for m, left in zip(matrices, lefts, strict=True)], axis_name
        )

        low_rank = iter([_times(p, q.T) for p, q in zip(lefts, rights, strict=True)])
        exact = iter(averaged[len(matrices) :])
        workers = _counts.number(averaged[len(leaves) :])
        means: list[jax.Array] = []
        sent: list[jax.Array] = []
        for leaf, shape in zip(leaves, shapes, strict=True):
            means.append(next(exact) if shape is None else next(low_rank).reshape(leaf.shape))
            sent.append(leaf if shape is None else _counts.over(workers, means[-1], axis_name))
        return Reduced(
            mean=jax.tree.unflatten(structure, means),
            sent=jax.tree.unflatten(structure, sent),
            finite=_alike.all_finite(means),
            overflow=0,
            state=PowerSgdState(list(map(_kept, rights, state.factors))),
            workers=workers,
        )

    def wire_bytes(self, like: PyTree) -> int:
        total = 0
        for leaf in jax.tree.leaves(like):
            shape = self._matrix(leaf)
            total += math.prod(leaf.shape) if shape is None else self.rank * sum(shape)
        return 4 * total

    def _matrix(self, like: Like) -> tuple[int, int] | None:
        """The shape of an array as a matrix, or None if it is to stay dense."""
        if len(like.shape) < 2:
            return None
        rows, columns = math.prod(like.shape[:-1]), like.shape[-1]
        worthwhile = self.rank * (rows + columns) < rows * columns
        return (rows, columns) if worthwhile and self.rank <= min(rows, columns) else None


def _kept(new: jax.Array, old: jax.Array) -> jax.Array:
    """The next factor, with its old columns where the gradient had nothing to put in place.

    A column of zeros would find nothing in any later gradient whose first rows are zero.
    """
    return jnp.where(jnp.any(new != 0, axis=0), new, old)


def _mean(arrays: list[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    if not arrays:
        return []
    whole, restore = _parts.as_one(arrays)
    return restore(lax.psum(whole * (1.0 / _axes.size(axis_name)), axis_name))


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    # Accelerators would round the factors to fewer bits, and feedback would see it as error.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
