"""What travels as thin factors: which arrays are matrices, their factors, and products of these."""

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Channel, Like, PyTree
from fftgrad.exchanges import _alike


def shape_of(like: Like, rank: int) -> tuple[int, int] | None:
    """The shape of an array as a matrix, or None if it is to stay dense."""
    if len(like.shape) < 2:
        return None
    rows, columns = math.prod(like.shape[:-1]), like.shape[-1]
    worthwhile = rank * (rows + columns) < rows * columns
    return (rows, columns) if worthwhile and rank <= min(rows, columns) else None


def shapes(like: PyTree, rank: int) -> list[tuple[int, int]]:
    """The shapes of the matrices."""
    found = (shape_of(leaf, rank) for leaf in jax.tree.leaves(like))
    return [shape for shape in found if shape is not None]


def dense_size(like: PyTree, rank: int) -> int:
    """How many values stay dense."""
    leaves = jax.tree.leaves(like)
    return sum(math.prod(leaf.shape) for leaf in leaves if shape_of(leaf, rank) is None)


def split(leaves: Sequence[jax.Array], rank: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """The matrices, and what stays dense."""
    pairs = [(leaf, shape_of(leaf, rank)) for leaf in leaves]
    return (
        [leaf.reshape(shape) for leaf, shape in pairs if shape is not None],
        [leaf for leaf, shape in pairs if shape is None],
    )


def join(
    likes: Iterable[Like], matrices: Iterable[jax.Array], dense: Iterable[jax.Array], rank: int
) -> list[jax.Array]:
    """The inverse of `split`."""
    products, others = iter(matrices), iter(dense)
    return [
        next(others) if shape_of(like, rank) is None else next(products).reshape(like.shape)
        for like in likes
    ]


def random_factors(like: PyTree, rank: int, axis: int) -> list[jax.Array]:
    """A factor of each matrix, as long as the matrix is along the axis; equal on all workers."""

    def drawn(length: int, seed: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (length, rank), jnp.float32)

    found = enumerate(shape_of(leaf, rank) for leaf in jax.tree.leaves(like))
    lengths = {i: shape[axis] for i, shape in found if shape is not None}
    seeds = np.array(list(lengths), np.uint32)
    return _alike.each(drawn, [(length,) for length in lengths.values()], list(seeds))


def orthonormal(factor: jax.Array) -> jax.Array:
    """Columns of length one, at right angles, that span what those of the factor span."""
    return jnp.linalg.qr(factor)[0]


def kept(new: jax.Array, old: jax.Array) -> jax.Array:
    """The next factor, with its old columns where the gradient had nothing to put in place.

    A column of zeros would find nothing in any later gradient whose first rows are zero.
    """
    return jnp.where(jnp.any(new != 0, axis=0), new, old)


def iterate(
    matrices: Sequence[jax.Array],
    factors: Sequence[jax.Array],
    dense: Sequence[jax.Array],
    channel: Channel,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """A step of the power iteration on the mean of the matrices M of all workers, in two sums.

    Returns P = orthonormal(mean M Q) for the factors Q, then mean Mᵀ P, then the means of what is
    dense, which travels with the first.
    """
    lefts = [times(m, factor) for m, factor in zip(matrices, factors, strict=True)]
    averaged, _ = channel.mean([*lefts, *dense])
    lefts = list(map(orthonormal, averaged[: len(matrices)]))
    products = [times(m.T, left) for m, left in zip(matrices, lefts, strict=True)]
    rights, _ = channel.mean(products)
    return lefts, rights, averaged[len(matrices) :]


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """The matrix that two factors stand for."""
    return times(left, right.T)


def times(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of matrices in float32."""
    # Accelerators would round the factors to fewer bits, and feedback would see it as error.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
