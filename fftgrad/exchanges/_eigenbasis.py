"""An exchange of matrix gradients in a basis in which they are sparser."""

import math
from collections.abc import Sequence
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
    """One side of n matrices of equal shape."""

    covariance: jax.Array  # moving average of G Gᵀ, or of Gᵀ G, float32[n, d, d]
    basis: jax.Array  # eigenvectors of the covariance, in columns, float32[n, d, d]
    scale: jax.Array  # divisors of the coordinates, float32[n, d]


Sides: TypeAlias = tuple[Side | tuple[()], Side | tuple[()]]
"""Left and right sides; () for a side that is not rotated."""


class EigenbasisState(NamedTuple):
    sides: tuple[Sides, ...]  # for each shape of a matrix, in the order of the leaves
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
    as one vector. With v the variances along the directions, s = (v / mean v)^(1/4). Muon
    amplifies errors of directions with small variance; s makes the relative errors of all
    directions similar. `error` is rotated back, so the residual stays valid if the basis changes.
    In an array of more than two axes, all axes except the last form the rows.

    Args:
      exchange: the inner exchange, such as `TwoStage(Budget(50), workers)`.
      decay: share of A that survives a step, 0 <= decay < 1.
      every: steps between updates of the basis; each of the first `every` steps updates it.
      largest: longest side that is rotated. A side of length d stores 2 d² + d values per worker,
        and an update of its basis takes a few products of d × d matrices.

    Wire: the bytes of the inner exchange for one vector of all values.

    Claims: those of the inner exchange. If the workers' devices round matrix products differently,
      their bases and means differ. Simulated CPU devices may hang without OPENBLAS_NUM_THREADS=1.

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
    largest: int = 1024

    def __post_init__(self) -> None:
        check_exchange("Eigenbasis(exchange)", self.exchange)
        check_within("Eigenbasis(decay)", self.decay, "[0, 1)", "use 0.95.")
        check_count("Eigenbasis(every)", self.every, "use 10.")
        check_count("Eigenbasis(largest)", self.largest, "use 1024.")
        one, remedy = self.exchange.scope in ("model", None), "use TwoStage(Budget(50), workers)."
        check(one, "Eigenbasis(exchange)", "take one vector", repr(self.exchange), remedy)

    @property
    def scope(self) -> Scope:
        return "leaf"

    def init(self, like: PyTree) -> State:
        def side(count: int, length: int, other: int) -> Side | tuple[()]:
            if other == 1 or not 1 < length <= self.largest:
                return ()
            basis = jnp.broadcast_to(jnp.eye(length), (count, length, length))
            return Side(jnp.zeros_like(basis), basis, jnp.ones((count, length)))

        state = self.exchange.init(_vector(like))
        shapes = list(map(_as_matrix, jax.tree.leaves(like)))
        sides = tuple(
            (side(len(own), rows, columns), side(len(own), columns, rows))
            for own in _parts.alike(shapes)
            for rows, columns in [shapes[own[0]]]
        )
        steps = jnp.zeros((), jnp.int32)
        return state._replace(shared=EigenbasisState(sides, steps, state.shared))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        sides, steps = state.shared.sides, state.shared.steps
        matrices = [leaf.reshape(_as_matrix(leaf)) for leaf in jax.tree.leaves(x)]
        groups = _parts.alike(matrix.shape for matrix in matrices)
        stacks = [jnp.stack([matrices[i] for i in group]) for group in groups]
        turned = [jax.vmap(_turn)(row) for row in zip(stacks, sides, strict=True)]
        vector, pieces = _shapes.as_one(turned)
        out = self.exchange.mean(vector, state._replace(shared=state.shared.inner), comm)
        rule, remedy = "have no memory of its own", "use TwoStage or AllGather."
        check(out.error is not None, "Eigenbasis(exchange)", rule, repr(self.exchange), remedy)
        mean, sent = pieces(out.mean), pieces(vector - out.error_or_zeros(vector))
        back = [jax.vmap(_turn_back)(row) for row in zip(mean, sent, sides, strict=True)]
        means, sents = zip(*back, strict=True) if back else ((), ())
        learned = self._learned(means, sides, steps)
        shared = EigenbasisState(learned, _count.next_step(steps), out.state.shared)
        # The difference after the rotation back, to include rounding errors of the rotation.
        errors = [stack - sent for stack, sent in zip(stacks, sents, strict=True)]

        def by_leaf(stacks: Sequence[jax.Array]) -> PyTree:
            leaves = dict[int, jax.Array]()
            for group, stack in zip(groups, stacks, strict=True):
                leaves.update(zip(group, _shapes.unstack(stack), strict=True))
            return _parts.rebuild([leaves[i] for i in range(len(leaves))], x)

        return out._replace(
            mean=by_leaf(means),
            error=by_leaf(errors),
            state=out.state._replace(shared=shared),
        )

    def _learned(
        self, means: Sequence[jax.Array], sides: Sequence[Sides], steps: jax.Array
    ) -> tuple[Sides, ...]:
        each = jax.vmap(self._with)
        learned = tuple(
            (left and each(left, mean), right and each(right, mean.mT))
            for mean, (left, right) in zip(means, sides, strict=True)
        )
        due = (steps % self.every == 0) | (steps < self.every)
        return lax.cond(due, self._all_renewed, lambda learned: learned, learned)

    def _all_renewed(self, learned: PyTree) -> PyTree:
        """Renew the sides; those of equal length in one stack, because QR compiles slowly."""
        is_side = lambda node: isinstance(node, Side)  # noqa: E731
        flat, structure = jax.tree.flatten(learned, is_leaf=is_side)
        for group in _parts.alike(side.scale.shape[1] for side in flat):
            own = [flat[i] for i in group]
            stack = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *own)
            new = jax.vmap(self._renewed)(stack)
            counts = [len(side.scale) for side in own]
            pieces = zip(*(_shapes.cut(leaf, counts) for leaf in new), strict=True)
            for i, piece in zip(group, pieces, strict=True):
                flat[i] = Side(*piece)
        return jax.tree.unflatten(structure, flat)

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
        scale = jnp.maximum(relative, FLOOR) ** 0.25
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
