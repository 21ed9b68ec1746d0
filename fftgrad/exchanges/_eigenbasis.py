"""An exchange of matrix gradients in a basis in which they are sparser."""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Averaged, Comm, Exchange, Like, PyTree, Scope, State
from fftgrad._values import check, check_count, check_within, value
from fftgrad.exchanges import _parts
from fftgrad.exchanges._recipe import check_exchange
from fftgrad.ops import _count, _finite, _shapes
from fftgrad.ops._rounding import times

FLOOR = 1e-3
"""Least variance of a direction, in units of the mean variance."""


class Side(NamedTuple):
    covariance: jax.Array  # moving average of G Gᵀ, or of Gᵀ G, float32[d, d]
    basis: jax.Array  # eigenvectors of the covariance, in columns, float32[d, d]
    scale: jax.Array  # divisors of the coordinates, float32[d]


Sides: TypeAlias = tuple[Side | tuple[()], Side | tuple[()]]
"""Left and right side of a matrix; () for a side that is not rotated."""


class EigenbasisState(NamedTuple):
    sides: tuple[Sides, ...]  # of each leaf
    steps: jax.Array  # number of means so far, int32[]
    inner: PyTree  # shared state of the inner exchange


@value
class Eigenbasis(Exchange):
    """Exchange: rotates matrices into the eigenbasis of earlier means for an inner exchange.

    In the eigenvectors of M Mᵀ and Mᵀ M, a gradient matrix M has few large coordinates. This halves
    the error of a selector. With Muon and `TwoStage` at 50x compression, the final loss on one task
    was 0.5 % above that of dense Muon, and 4.1 % without the rotation (docs/results/training.md).
    Steps take longer, so `Eigenbasis` pays off over links below 0.1 Gbit/s.

    All workers compute the basis from the mean gradient G, so no basis is sent. For the left side:

        A = decay · A + (1 - decay) · G Gᵀ,    Q = orthonormal(A Q),    x = (Qᵀ M R) / (s tᵀ).

    The right side has R and t in place of Q and s, from Gᵀ G. The inner exchange gets x, all leaves
    as one vector. With v the variances along the directions, s = (v / mean v)^(whiten / 2). Muon
    amplifies errors of directions with small variance; s makes the relative errors of all
    directions similar. `error` is rotated back, so the residual stays valid if the basis changes.
    In an array of more than two axes, all axes except the last form the rows.

    Args:
      exchange: the inner exchange, such as `TwoStage(Budget(50), workers)`.
      decay: share of A that survives a step, 0 <= decay < 1.
      every: steps between updates of the basis; each of the first `every` steps updates it.
      whiten: exponent, 0 ... 1; 0 does not scale, 0.5 divides singular values by their usual sizes.
      largest: longest side that is rotated. A side of length d stores 2 d² + d values per worker,
        and an update of its basis takes a few products of d × d matrices.

    Wire: the bytes of the inner exchange for one vector of all values.

    Claims: those of the inner exchange. If the workers' devices round matrix products differently,
      their bases and means differ.

    Raises:
      ValueError: if the inner exchange needs leaves, as `PowerSgd`; while tracing, if it keeps a
        residual of its own, as `Hierarchical`.

    Example:
      >>> exchange = fg.Eigenbasis(fg.AllGather(fg.codecs.Identity()))
      >>> x = jnp.arange(12.0).reshape(2, 3, 2)
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> bool(jnp.allclose(jax.vmap(mean, axis_name="data")(x)[0], x.mean(0)))
      True

    References:
      The basis is that of SOAP: Vyas et al., arXiv:2409.11321, which keeps Adam's moments in it.
      Its use for codecs is ours: docs/results/training.md has the runs.
    """

    exchange: Exchange
    decay: float = 0.95
    every: int = 10
    whiten: float = 0.5
    largest: int = 1024

    def __post_init__(self) -> None:
        check_exchange("Eigenbasis(exchange)", self.exchange)
        check_within("Eigenbasis(decay)", self.decay, "[0, 1)", "use 0.95.")
        check_count("Eigenbasis(every)", self.every, "use 10.")
        check_within("Eigenbasis(whiten)", self.whiten, "[0, 1]", "use 0.5.")
        check_count("Eigenbasis(largest)", self.largest, "use 1024.")
        one, remedy = self.exchange.scope in ("model", None), "use TwoStage(Budget(50), workers)."
        check(one, "Eigenbasis(exchange)", "take one vector", repr(self.exchange), remedy)

    @property
    def scope(self) -> Scope:
        return "leaf"

    def init(self, like: PyTree) -> State:
        def side(length: int, other: int) -> Side | tuple[()]:
            if other == 1 or not 1 < length <= self.largest:
                return ()
            return Side(jnp.zeros((length, length)), jnp.eye(length), jnp.ones(length))

        state = self.exchange.init(_vector(like))
        shapes = map(_as_matrix, jax.tree.leaves(like))
        sides = tuple((side(rows, columns), side(columns, rows)) for rows, columns in shapes)
        steps = jnp.zeros((), jnp.int32)
        return state._replace(shared=EigenbasisState(sides, steps, state.shared))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        sides, steps = state.shared.sides, state.shared.steps
        matrices = [leaf.reshape(_as_matrix(leaf)) for leaf in jax.tree.leaves(x)]
        turned = _parts.each(_turn, list(zip(matrices, sides, strict=True)))
        vector, pieces = _shapes.as_one(turned)
        out = self.exchange.mean(vector, state._replace(shared=state.shared.inner), comm)
        rule, remedy = "have no memory of its own", "use TwoStage or AllGather."
        check(out.error is not None, "Eigenbasis(exchange)", rule, repr(self.exchange), remedy)
        mean, sent = pieces(out.mean), pieces(vector - out.error_or_zeros(vector))
        back = _parts.each(_turn_back, list(zip(mean, sent, sides, strict=True)))
        mean, sent = (_parts.rebuild(part, x) for part in zip(*back, strict=True))
        learned = self._learned([mean for mean, _ in back], sides, steps)
        shared = EigenbasisState(learned, _count.next_step(steps), out.state.shared)
        return out._replace(
            mean=mean,
            # The difference after the rotation back, to include rounding errors of the rotation.
            error=jax.tree.map(jnp.subtract, x, sent),
            state=out.state._replace(shared=shared),
        )

    def _learned(self, means: list[jax.Array], sides: PyTree, steps: jax.Array) -> PyTree:
        def learn(row: tuple[jax.Array, Sides]) -> PyTree:
            mean, own = row
            both = zip(own, (mean, mean.T), strict=True)
            return tuple(side and self._with(side, matrix) for side, matrix in both)

        learned = _parts.each(learn, list(zip(means, sides, strict=True)))
        due = (steps % self.every == 0) | (steps < self.every)

        def renewed(learned: PyTree) -> PyTree:
            flat = [side for own in learned for side in own if side]
            new = iter(_parts.each(self._renewed, flat))
            return [tuple(side and next(new) for side in own) for own in learned]

        return tuple(lax.cond(due, renewed, lambda learned: learned, learned))

    def _with(self, side: Side, matrix: jax.Array) -> Side:
        share = (1 - self.decay) * times(matrix, matrix.T)
        # Skip a square that overflows, because the moving average would stay non-finite.
        share = jnp.where(_finite.all_finite(share), share, (1 - self.decay) * side.covariance)
        return side._replace(covariance=self.decay * side.covariance + share)

    def _renewed(self, side: Side) -> Side:
        top = jnp.max(jnp.abs(side.covariance))
        covariance = side.covariance / jnp.where(top > 0, top, 1.0)
        basis = jnp.linalg.qr(times(covariance, side.basis))[0]
        variance = jnp.sum(basis * times(covariance, basis), axis=0)
        mean = jnp.mean(variance)
        relative = jnp.where(mean > 0, variance / jnp.where(mean > 0, mean, 1.0), 1.0)
        scale = jnp.maximum(relative, FLOOR) ** (self.whiten / 2)
        return Side(side.covariance, basis, scale)

    def wire_bytes(self, like: PyTree) -> int:
        return self.exchange.wire_bytes(_vector(like))

    def link_bytes(self, like: PyTree, workers: int) -> float:
        return self.exchange.link_bytes(_vector(like), workers)


def _as_matrix(like: Like) -> tuple[int, int]:
    """Return the shape of an array as a matrix; a vector is a matrix with one row."""
    if len(like.shape) < 2:
        return 1, math.prod(like.shape)
    return math.prod(like.shape[:-1]), like.shape[-1]


def _vector(like: PyTree) -> Like:
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    return jax.ShapeDtypeStruct((size,), jnp.float32)


def _turn(row: tuple[jax.Array, Sides]) -> jax.Array:
    matrix, (left, right) = row
    if left:
        matrix = times(left.basis.T, matrix) / left.scale[:, None]
    if right:
        matrix = times(matrix, right.basis) / right.scale[None]
    return matrix


def _turn_back(row: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    *matrices, (left, right) = row
    if left:
        matrices = [times(left.basis, matrix * left.scale[:, None]) for matrix in matrices]
    if right:
        matrices = [times(matrix * right.scale[None], right.basis.T) for matrix in matrices]
    return tuple(matrices)
