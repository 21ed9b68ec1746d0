"""Dion: distributed orthonormal updates."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import Averaged, AxisName, Comm, Exchange, Like, PyTree, Scope, State, Stats
from fftgrad._values import check_count, check_transformation, check_within, value
from fftgrad.exchanges import _bucketing, _low_rank, _parts
from fftgrad.memories import ErrorFeedback
from fftgrad.ops import _finite
from fftgrad.ops._shapes import by_path
from fftgrad.training._gradients import widened
from fftgrad.training._pmean import CompressedPmeanState, compressed_pmean

ADAM = optax.scale_by_adam()


class DionState(NamedTuple):
    """State of `scale_by_dion`."""

    pmean: CompressedPmeanState  # factors Q; each worker's momentum, stored as its residual
    others: optax.OptState  # optimizer state of all other leaves, equal on all workers


def scale_by_dion(
    rank: int = 64,
    decay: float = 0.95,
    others: optax.GradientTransformation = ADAM,
    *,
    dense: tuple[str, ...] = (),
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Method: a momentum on each worker, and an orthonormal update from their low-rank mean.

    For each matrix, worker i has a gradient G_i and a momentum M_i. All workers share a factor Q:

        M_i = M_i + G_i,   P = orthonormal(mean M_i Q),   R = mean M_iᵀ P,
        M_i = M_i - (1 - decay) P Rᵀ,   Q = R with columns of length one,
        update = √(out / in) P Qᵀ.

    `out` is the last axis of a kernel, as in JAX's layers, where y = x W. `in` is the product of
    all other axes, including the window of a convolution.

    If a column of R is zero, Q keeps its previous column. The optimizer `others` updates vectors,
    matrices too small for `PowerSgd` to compress, and the leaves named by `dense`. The gradients of
    these leaves are averaged in float32. The momentum is the residual of error feedback, so it
    differs between the workers.

    Args:
      rank: number of columns of P and Q.
      decay: the share of P Rᵀ that stays in the momentum; μ in the paper.
      others: the optimizer of all other leaves; it uses the same learning rate.
      dense: words in the paths of leaves for `others`. Name embeddings and the last layer, for
        which matrix updates worked poorly in the paper.
      axis_name: the axis of the workers.

    Returns:
      An optax transformation whose updates are directions. Chain `optax.add_decayed_weights` and
      `optax.scale_by_learning_rate` after it.

    Wire: 4 · rank · (rows + columns) bytes per matrix and 4 bytes per value of other leaves, in two
      all-reduces, for any number of workers.

    Claims: the update of a bad step is NaN, and the state stays unchanged.

    Differs from the paper: the orthonormal factor P has `in` rows, because a kernel is the
      transpose of the authors' weight. A later version of their code orthonormalizes the factor
      with more rows, which is P only if in > out. Arrays with more than two axes become matrices.
      `others` updates matrices that a factorization would not shrink. If a parameter is sharded
      over another axis, each shard is a matrix of its own.

    Example:
      >>> import optax
      >>> method = fg.methods.scale_by_dion(rank=16, dense=("embed", "head"))
      >>> tx = optax.chain(method, optax.scale_by_learning_rate(0.01))

    References:
      Ahn, Xu, Abreu and Langford, 2025, arXiv:2504.05295.
    """
    check_transformation("scale_by_dion(others)", others)
    check_count("scale_by_dion(rank)", rank, "use rank=64.")
    check_within("scale_by_dion(decay)", decay, "[0, 1)", "use 0.95.")
    exchange = Directions(rank, decay, dense)
    directions: Any = compressed_pmean(exchange, ErrorFeedback(), axis_name=axis_name)

    def is_other(name: str, leaf: Like) -> bool:
        too_long = math.prod(leaf.shape) > _bucketing.BUCKET_LIMIT  # the exchange would split it
        return exchange.is_named(name) or too_long or _low_rank.matrix_shape(leaf, rank) is None

    def of_others(tree: PyTree) -> PyTree:
        named = by_path(tree).items()
        return jax.tree.unflatten(jax.tree.structure(tree), [is_other(*pair) for pair in named])

    beside: Any = optax.masked(others, of_others)

    def init(params: optax.Params) -> DionState:
        wide = widened(params)
        return DionState(directions.init(wide), beside.init(wide))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, DionState]:
        # In float32, so that the rounding error of a direction does not enter the momentum.
        found, pmean = directions.update(widened(updates), state.pmean, params, **extra)
        found, moved = beside.update(found, state.others, params, **extra)
        finite = pmean.skipped == state.pmean.skipped
        found = _finite.nan_unless(finite, found)
        narrow = optax.tree.cast_like(found, updates)
        return narrow, DionState(pmean, optax.tree.where(finite, moved, state.others))

    return optax.GradientTransformationExtraArgs(init, update)


@value
class Directions(Exchange):
    """Exchange: returns the update direction of each matrix instead of the mean.

    `x` is the momentum, and its `error` is the momentum of the next step.
    """

    rank: int
    decay: float
    dense: tuple[str, ...]

    @property
    def scope(self) -> Scope:
        return "leaf"

    def is_named(self, name: str) -> bool:
        return any(word in name for word in self.dense)

    def init(self, like: PyTree) -> State:
        named = jax.eval_shape(self._flat, like)
        return State(shared=_low_rank.random_factors(named, self.rank, axis=1))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        named = self._flat(x)
        matrices, dense = _low_rank.split(named, self.rank)
        lefts, rights, exact = _low_rank.iterate(matrices, state.shared, dense, comm)
        units = list(map(_of_length_one, rights))
        scales = [(m.shape[1] / m.shape[0]) ** 0.5 for m in matrices]
        unscaled = map(_low_rank.product, lefts, units)
        directions = [scale * matrix for scale, matrix in zip(scales, unscaled, strict=True)]
        low_rank = map(_low_rank.product, lefts, rights)
        taken = [(1 - self.decay) * matrix for matrix in low_rank]

        def tree(matrices: list[jax.Array], dense: list[jax.Array]) -> PyTree:
            return _parts.rebuild(_low_rank.join(named, matrices, dense, self.rank), x)

        return Averaged(
            mean=tree(directions, exact),
            error=jax.tree.map(jnp.subtract, x, tree(taken, dense)),
            state=State(shared=list(map(_low_rank.kept_columns, units, state.shared))),
            stats=Stats(finite=_finite.all_finite(rights)),
        )

    def _flat(self, x: PyTree) -> list[jax.Array]:
        """Return the parts. Flatten the leaves named by `dense`, so that they are not matrices."""
        parts = _parts.parts_of(x)
        return [part.value.ravel() if self.is_named(part.name) else part.value for part in parts]


def _of_length_one(factor: jax.Array) -> jax.Array:
    """Divide each column by its length, except columns of zeros."""
    top = jnp.max(jnp.abs(factor), axis=0, keepdims=True)
    scaled = factor / _finite.unit_for(top)
    length = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=0, keepdims=True))
    return scaled / jnp.where(length == 0, 1.0, length)
