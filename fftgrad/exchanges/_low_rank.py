"""Low-rank means of matrices: PowerSGD and ACP-SGD."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fftgrad._contracts import Averaged, Comm, Exchange, Like, PyTree, Scope, State
from fftgrad._values import check_count, value
from fftgrad.exchanges import _parts
from fftgrad.ops import _shapes
from fftgrad.ops._rounding import times


def matrix_shape(like: Like, rank: int) -> tuple[int, int] | None:
    """Return the shape of an array as a matrix; None if the array is sent dense."""
    if len(like.shape) < 2:
        return None
    rows, columns = math.prod(like.shape[:-1]), like.shape[-1]
    worthwhile = rank * (rows + columns) < rows * columns
    return (rows, columns) if worthwhile and rank <= min(rows, columns) else None


def split(leaves: Sequence[jax.Array], rank: int) -> tuple[list[jax.Array], list[jax.Array]]:
    pairs = [(leaf, matrix_shape(leaf, rank)) for leaf in leaves]
    return (
        [leaf.reshape(shape) for leaf, shape in pairs if shape is not None],
        [leaf for leaf, shape in pairs if shape is None],
    )


def join(
    likes: Iterable[Like], matrices: Iterable[jax.Array], dense: Iterable[jax.Array], rank: int
) -> list[jax.Array]:
    """Merge matrices and dense leaves in the order of `likes`; the matrices keep their shapes."""
    products, others = iter(matrices), iter(dense)
    return [next(others if matrix_shape(like, rank) is None else products) for like in likes]


def random_factors(like: PyTree, rank: int, axis: int) -> list[jax.Array]:
    """Draw a factor float32[shape[axis], rank] for each matrix; equal on all workers."""
    shapes = [matrix_shape(leaf, rank) for leaf in jax.tree.leaves(like)]
    lengths = {i: shape[axis] for i, shape in enumerate(shapes) if shape is not None}
    numbers = list(lengths)
    found = dict[int, jax.Array]()
    for group in _parts.alike(lengths.values()):
        own = [numbers[i] for i in group]
        shape = lengths[own[0]], rank
        keys = jax.vmap(jax.random.key)(np.array(own, np.uint32))
        factors = jax.vmap(lambda key, s=shape: jax.random.normal(key, s, jnp.float32))(keys)
        found.update(zip(own, _shapes.unstack(factors), strict=True))
    return [found[i] for i in numbers]


def orthonormal(factor: jax.Array) -> jax.Array:
    return jnp.linalg.qr(factor)[0]


def kept_columns(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the new factor, but keep an old column if the new column is zero.

    QR turns a zero column into e_j. The new column is then row j of the gradient, which may be 0.
    """
    return jnp.where(jnp.any(new != 0, axis=0), new, old)


def iterate(
    matrices: Sequence[jax.Array],
    factors: Sequence[jax.Array],
    dense: Sequence[jax.Array],
    comm: Comm,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Return P = orthonormal(mean M Q) for all factors Q, mean Mᵀ P, and the dense means."""
    averaged, _ = comm.mean([*map(times, matrices, factors), *dense])
    lefts = list(map(orthonormal, averaged[: len(matrices)]))
    rights, _ = comm.mean([times(m.T, left) for m, left in zip(matrices, lefts, strict=True)])
    return lefts, rights, averaged[len(matrices) :]


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    return times(left, right.T)


@value
class _LowRank(Exchange):
    rank: int = 2

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__}(rank)", self.rank, "use rank=2.")

    @property
    def scope(self) -> Scope:
        return "leaf"


@value
class PowerSgd(_LowRank):
    """Exchange: approximates the mean of each matrix by P Qᵀ, with two small all-reduces.

    Worker i has the n × m matrix M_i. All workers have the factor Q, which is Q' of the last step:

        P = orthonormal(mean M_i Q),   Q' = mean M_iᵀ P,   mean ≈ P Q'ᵀ.

    This power iteration converges if the gradient changes slowly. In an array of more than two
    axes, all axes except the last form the rows. The first all-reduce also sends dense leaves:
    vectors, and matrices that are not larger than their two factors. Each leaf is compressed on its
    own. Use it with `ErrorFeedback()`.

    Args:
      rank: number of columns of P and Q.

    Wire: for any number of workers, 4 (n + m) · rank bytes for each n × m matrix, and 4 bytes for
      each value of a dense leaf.

    Claims: the error of a worker is M_i - P Q'ᵀ, as in the authors' code. A matrix of zeros has the
      mean zero and leaves Q as it is.

    Differs from the paper: orthonormal(...) uses Householder reflections in place of Gram-Schmidt,
      which divides by zero if a column is zero.

    Example:
      >>> exchange = fg.PowerSgd(rank=1)
      >>> x = jnp.outer(jnp.arange(4.0), jnp.arange(5.0))[None]
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> bool(jnp.allclose(jax.vmap(mean, axis_name="data")(x), x, atol=1e-5))
      True

    References:
      Vogels, Karimireddy and Jaggi, NeurIPS 2019, arXiv:1905.13727.
    """

    def init(self, like: PyTree) -> State:
        return State(shared=random_factors(like, self.rank, axis=1))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        leaves, factors = jax.tree.leaves(x), state.shared
        matrices, dense = split(leaves, self.rank)
        lefts, rights, exact = iterate(matrices, factors, dense, comm)
        low_rank = list(map(product, lefts, rights))
        means, sent = (
            _parts.rebuild(join(leaves, low_rank, others, self.rank), x)
            for others in (exact, dense)
        )
        kept = list(map(kept_columns, rights, factors))
        return Averaged(means, jax.tree.map(jnp.subtract, x, sent), State(shared=kept))


Factors: TypeAlias = list[jax.Array]


class AcpSgdState(NamedTuple):
    """State of `AcpSgd`: both factors of each matrix, equal on all workers."""

    turn: jax.Array  # int32: 0 if the next step sends `first`, 1 if it sends `second`
    first: Factors  # left factors; right factors of flipped matrices
    second: Factors


@value
class AcpSgd(_LowRank):
    """Exchange: approximates the mean of each matrix by P Qᵀ, with one small all-reduce.

    Worker i has the n × m matrix M_i. All workers have P and Q of the last step:

        odd steps:   Q = orthonormal(Q),   P_i = M_i Q,    sent_i = P_i Qᵀ,   P = mean P_i,
        even steps:  P = orthonormal(P),   Q_i = M_iᵀ P,   sent_i = P Q_iᵀ,   Q = mean Q_i.

    The mean is P Qᵀ in every step. A step is half an iteration of `PowerSgd`: it sends about half
    the bytes, in one all-reduce instead of two. Bad steps are not counted, so P and Q also
    alternate after a bad step.

    P has n · rank values, and Q has m · rank. Some matrices are flipped: they send Q in odd steps
    and P in even steps, so that all steps send similar numbers of values. In the order of
    decreasing |n - m|, each matrix assigns its larger factor to the steps, odd or even, that send
    fewer values so far.

    Each leaf is compressed on its own. The same leaves are dense as with `PowerSgd`. Use it with
    `ErrorFeedback()`.

    Args:
      rank: number of columns of P and Q.

    Wire: for any number of workers, 4 bytes for each value of a dense leaf and 4 · rank · max(a, b)
      bytes for the matrices. Here a is the sum over the matrices of n, or of m if flipped, and b is
      the sum of their other sides.

    Claims: the error of worker i is M_i - sent_i, and the mean is the mean of all sent_i. So the
      residuals stay bounded. With `PowerSgd` they grow, because they also collect the differences
      between workers. A matrix of zeros has the mean zero, and the factors recover in later steps.

    Differs from the paper: matrices are flipped; Householder reflections orthogonalize P and Q.

    Example:
      >>> exchange = fg.exchanges.AcpSgd(rank=1)
      >>> x = jnp.outer(jnp.arange(4.0), jnp.arange(5.0))[None]
      >>> def twice(x):
      ...     first = exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data"))
      ...     return exchange.mean(x, first.state, fg.exchanges.Comm("data")).mean
      >>> bool(jnp.allclose(jax.vmap(twice, axis_name="data")(x), x, atol=1e-5))
      True

    References:
      Zhang, Li, Shi, Chu and Li, ICDCS 2023, arXiv:2306.08881.
    """

    def init(self, like: PyTree) -> State:
        lefts, rights = (random_factors(like, self.rank, axis) for axis in (0, 1))
        matrices, _ = jax.eval_shape(lambda x: split(jax.tree.leaves(x), self.rank), like)
        factors = _flipped(_flips(matrices), lefts, rights)
        return State(shared=AcpSgdState(jnp.zeros((), jnp.int32), *factors))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        leaves, before = jax.tree.leaves(x), state.shared
        matrices, dense = split(leaves, self.rank)
        flips = _flips(matrices)
        turned = [m.T if flip else m for m, flip in zip(matrices, flips, strict=True)]
        room = max(_size(before.first), _size(before.second))

        def send_first() -> tuple[jax.Array, Factors, Factors]:
            bases = list(map(orthonormal, before.second))
            return _in_room(map(times, turned, bases), room), before.first, bases

        def send_second() -> tuple[jax.Array, Factors, Factors]:
            bases = list(map(orthonormal, before.first))
            return _in_room(map(times, [m.T for m in turned], bases), room), bases, before.second

        is_first = before.turn == 0
        # The collective stays outside the condition, so that a scheduler can overlap it.
        own, first, second = lax.cond(is_first, send_first, send_second)
        (averaged, *exact), stats = comm.mean([own, *dense])

        def whole(vector: jax.Array, dense: list[jax.Array]) -> tuple[PyTree, Any]:
            """Return the tree of products, and the factors; `vector` holds the sent factors."""
            factors = (
                optax.tree.where(is_first, _out_of(vector, first), first),
                optax.tree.where(is_first, second, _out_of(vector, second)),
            )
            products = map(product, *_flipped(flips, *factors))
            return _parts.rebuild(join(leaves, products, dense, self.rank), x), factors

        mean, factors = whole(averaged, exact)
        pairs = zip(factors, (before.first, before.second), strict=True)
        kept = (list(map(kept_columns, *pair)) for pair in pairs)
        error = jax.tree.map(jnp.subtract, x, whole(own, dense)[0])
        return Averaged(mean, error, State(shared=AcpSgdState(1 - before.turn, *kept)), stats)


def _flips(matrices: Sequence[Like]) -> list[bool]:
    """Choose the flipped matrices, so that odd and even steps send similar numbers of values."""
    longer = [matrix.shape[0] - matrix.shape[1] for matrix in matrices]
    flips = [False] * len(longer)
    ahead = 0  # rows in odd steps minus rows in even steps
    for i in sorted(range(len(longer)), key=lambda i: -abs(longer[i])):
        flips[i] = ahead * longer[i] > 0
        ahead += -longer[i] if flips[i] else longer[i]
    return flips


def _flipped(flips: Sequence[bool], a: Factors, b: Factors) -> tuple[Factors, Factors]:
    """Swap the two factors of flipped matrices."""
    pairs = [(y, x) if flip else (x, y) for flip, x, y in zip(flips, a, b, strict=True)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _size(factors: Sequence[jax.Array]) -> int:
    return sum(factor.size for factor in factors)


def _in_room(factors: Iterable[jax.Array], room: int) -> jax.Array:
    whole, _ = _shapes.as_one(list(factors))
    return jnp.pad(whole, (0, room - whole.size))


def _out_of(vector: jax.Array, likes: Sequence[jax.Array]) -> list[jax.Array]:
    pieces = _shapes.cut(vector[: _size(likes)], [like.size for like in likes])
    return _parts.rebuild(pieces, likes)
