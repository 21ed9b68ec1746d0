"""A low-rank mean in one all-reduce: one factor travels, in turns."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad._contracts import Channel, Exchange, PyTree, Reduced, Scope, State
from fftgrad._values import check_count, value
from fftgrad.exchanges import _low_rank
from fftgrad.ops import _shapes

_T = TypeVar("_T")


class AcpSgdState(NamedTuple):
    """State: both factors of each matrix, equal on all workers.

    Attributes:
      turn: which of them travel in the next step, int32: 0 for the first, 1 for the second.
      first: the left factors, but the right ones of matrices that are flipped.
      second: the others.
    """

    turn: jax.Array
    first: list[jax.Array]
    second: list[jax.Array]


@value
class AcpSgd(Exchange):
    """Exchange: the mean of each matrix as P Qᵀ, with one small all-reduce of P and Q in turns.

    For the matrices M_i of the workers, n × m, and the factors of the step before:

        odd steps:   Q = orthonormal(Q),   P_i = M_i Q,    sent_i = P_i Qᵀ,   P = mean P_i,
        even steps:  P = orthonormal(P),   Q_i = M_iᵀ P,   sent_i = P Q_iᵀ,   Q = mean Q_i,

    and the mean is P Qᵀ in both. That is `PowerSgd` with half of its iteration in each step, at
    about half of its bytes, and one collective to wait for in place of two.

    Some matrices are flipped: they send Q in odd steps. They are gone through from the most oblong
    to the most square, and each sends its longer side in the steps that have less so far. So all
    steps have about as many values, and the buffer has room for the most, in every step.

    Which step is odd is counted by the state, not by the number of the step: a step that left no
    trace is no turn, or the same factor would travel again and the other stay what it was.

    Arrays of more axes become matrices with their last axis as columns; vectors, and what a
    factorization would not make smaller, travel dense in the same all-reduce. Its parts are the
    leaves, in their shapes. Use it with `ErrorFeedback()`.

    Args:
      rank: number of columns of P and Q.

    Shapes: x float32[...], or a tuple of parts -> mean, error of the same shapes.

    Wire: 4 · rank · max(Σ of what travels in odd steps, in even ones) bytes, n or m a matrix, and
      4n for what stays dense, whatever the number of workers.

    Claims: all workers get the same bits. What counts as sent is the worker's own
      product, and the mean is that of what all sent. So what differs between the workers leaves
      their residuals too, which stay as long as they are where those of `PowerSgd` grow. A matrix
      of zeros gives zeros, and the factors recover from it.

    Differs from the paper: matrices are flipped to balance the two kinds of steps; orthonormal by
      Householder reflections.

    Raises:
      ValueError: if `rank` is not positive.

    Example:
      >>> exchange = fg.AcpSgd(rank=1)
      >>> x = jnp.outer(jnp.arange(4.0), jnp.arange(5.0))[None]
      >>> def twice(x):
      ...     first = exchange.mean(x, exchange.init(x), fg.exchanges.Channel("data"))
      ...     return exchange.mean(x, first.state, fg.exchanges.Channel("data")).mean
      >>> bool(jnp.allclose(jax.vmap(twice, axis_name="data")(x), x, atol=1e-5))
      True

    References:
      Zhang, Li, Shi, Chu and Li, ICDCS 2023, arXiv:2306.08881.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        check_count("AcpSgd(rank)", self.rank, "use rank=2.")

    @property
    def scope(self) -> Scope:
        return "leaf"

    def init(self, like: PyTree) -> State:
        lefts, rights = (_low_rank.random_factors(like, self.rank, axis) for axis in (0, 1))
        flips = _flips(_low_rank.shapes(like, self.rank))
        factors = _flipped(flips, lefts, rights)
        return State(shared=AcpSgdState(jnp.zeros((), jnp.int32), *factors))

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        leaves, structure = jax.tree.flatten(x)
        before: AcpSgdState = state.shared
        matrices, dense = _low_rank.split(leaves, self.rank)
        flips = _flips(_low_rank.shapes(leaves, self.rank))
        turned = [m.T if flip else m for m, flip in zip(matrices, flips, strict=True)]
        room = max(_size(before.first), _size(before.second))

        def send_first() -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
            bases = list(map(_low_rank.orthonormal, before.second))
            return _in_room(_products(turned, bases), room), before.first, bases

        def send_second() -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
            bases = list(map(_low_rank.orthonormal, before.first))
            return _in_room(_products([m.T for m in turned], bases), room), bases, before.second

        is_first = before.turn == 0
        # Only what the worker has of its own is computed under the condition: the sum outside of
        # it always runs, so that a scheduler may put other work beside it.
        own, first, second = lax.cond(is_first, send_first, send_second)
        (averaged, *exact), tally = channel.mean([own, *dense])

        def factors(vector: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            """Both factors of each matrix, where the vector holds those that travelled."""
            return (
                optax.tree.where(is_first, _out_of(vector, first), first),
                optax.tree.where(is_first, second, _out_of(vector, second)),
            )

        def tree(
            factors: tuple[list[jax.Array], list[jax.Array]], dense: list[jax.Array]
        ) -> PyTree:
            products = map(_low_rank.product, *_flipped(flips, *factors))
            return jax.tree.unflatten(structure, _low_rank.join(leaves, products, dense, self.rank))

        common = factors(averaged)
        kept = AcpSgdState(
            1 - before.turn,
            list(map(_low_rank.kept, common[0], before.first)),
            list(map(_low_rank.kept, common[1], before.second)),
        )
        error = jax.tree.map(jnp.subtract, x, tree(factors(own), dense))
        return Reduced(tree(common, exact), error, State(shared=kept), tally)

    def wire_bytes(self, like: PyTree) -> int:
        shapes = _low_rank.shapes(like, self.rank)
        rows, columns = ([shape[axis] for shape in shapes] for axis in (0, 1))
        longer = max(map(sum, _flipped(_flips(shapes), rows, columns)))
        return 4 * (self.rank * longer + _low_rank.dense_size(like, self.rank))


def _flips(shapes: Sequence[tuple[int, int]]) -> list[bool]:
    """Which matrices send their right factor first, so that all steps send about as much."""
    flips = [False] * len(shapes)
    ahead = 0  # by how many rows odd steps send more than even ones
    for i in sorted(range(len(shapes)), key=lambda i: -abs(shapes[i][0] - shapes[i][1])):
        more = shapes[i][0] - shapes[i][1]
        flips[i] = ahead * more > 0
        ahead += -more if flips[i] else more
    return flips


def _flipped(flips: Sequence[bool], a: Sequence[_T], b: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """Left and right factors as first and second ones, or back."""
    pairs = [(y, x) if flip else (x, y) for flip, x, y in zip(flips, a, b, strict=True)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _products(matrices: Sequence[jax.Array], bases: Sequence[jax.Array]) -> list[jax.Array]:
    return [_low_rank.times(m, base) for m, base in zip(matrices, bases, strict=True)]


def _size(factors: Sequence[jax.Array]) -> int:
    return sum(factor.size for factor in factors)


def _in_room(factors: Sequence[jax.Array], room: int) -> jax.Array:
    whole, _ = _shapes.as_one(factors)
    return jnp.pad(whole, (0, room - whole.size))


def _out_of(vector: jax.Array, likes: Sequence[jax.Array]) -> list[jax.Array]:
    pieces = _shapes.cut(vector[: _size(likes)], [like.size for like in likes])
    return [piece.reshape(like.shape) for piece, like in zip(pieces, likes, strict=True)]
