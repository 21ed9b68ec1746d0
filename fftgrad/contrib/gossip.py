"""Gossip: workers average with their neighbors on a graph instead of with all workers.

A graph is a symmetric matrix W [workers, workers] of weights >= 0, with rows that sum to 1. In an
average with γ = 1, worker i moves towards worker j by the share W_ij of their difference.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad._values import check_count, check_transformation
from fftgrad.contrib import _links
from fftgrad.contrib._links import Gossip, Weights
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.exchanges._parts import Codecs
from fftgrad.exchanges._shards import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.ops import _count, _finite
from fftgrad.training._gradients import checked_like

__all__ = ["beer", "choco_sgd", "largest_gamma", "ring", "torus"]


def ring(workers: int) -> Weights:
    """Function: make the weights of a ring, on which each worker has two neighbors.

    A worker and its neighbors have weight 1/3, or 1/2 with two workers. The spectral gap, 1 minus
    the second largest |eigenvalue|, is 0.20 for 8 workers, 0.051 for 16, and 0.0032 for 64.

    Args:
      workers: number of workers.

    Returns:
      float64[workers, workers].

    Example:
      >>> from fftgrad.contrib import gossip
      >>> gossip.ring(4).round(2).tolist()[0]
      [0.33, 0.33, 0.0, 0.33]
    """
    return _equal(_beside(workers))


def torus(rows: int, columns: int) -> Weights:
    """Function: make the weights of a torus, on which each worker has four neighbors.

    Worker i is in row i // columns and column i % columns. Each row and each column is a ring. A
    worker and its neighbors have weight 1/5, or more if a ring has only one or two workers.

    Args:
      rows: number of rows.
      columns: number of columns.

    Returns:
      float64[rows · columns, rows · columns].

    Example:
      >>> from fftgrad.contrib import gossip
      >>> gossip.torus(4, 4).max().item()
      0.2
    """
    down, across = _beside(rows), _beside(columns)
    return _equal(np.kron(down, np.eye(columns)) + np.kron(np.eye(rows), across))


def largest_gamma(weights: npt.ArrayLike) -> float:
    """Function: compute the largest γ for which an average does not overshoot.

    This γ is min(1, 1 / (1 - λ)), with λ the smallest eigenvalue of the weights. An average scales
    differences between workers by factors >= 1 - γ (1 - λ). A larger γ could change their sign.

    Args:
      weights: the matrix of a graph.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> round(gossip.largest_gamma(gossip.ring(8)), 3)
      0.75
    """
    smallest = float(np.linalg.eigvalsh(np.asarray(weights)).min())
    return 1 / (1 - min(round(smallest, 12), 0.0))


def _beside(workers: int) -> Weights:
    """Make the adjacency matrix of a ring."""
    eye = np.eye(check_count("gossip(workers)", workers, "use that of the axis."))
    return np.maximum(np.roll(eye, 1, axis=1), np.roll(eye, -1, axis=1)) * (1 - eye)


def _equal(hears: Weights) -> Weights:
    """Make weights that are equal for a worker and its neighbors, from an adjacency matrix."""
    out = (hears > 0) + np.eye(len(hears))
    return out / out.sum(1, keepdims=True)


class ChocoState(NamedTuple):
    """State of `choco_sgd`."""

    step: jax.Array  # number of updates, int32, equal on all workers
    inner: PerWorker  # state of each worker's inner optimizer
    neighbors: PerWorker  # `Links` of each worker, with the parameters as tree


def choco_sgd(
    inner: optax.GradientTransformation,
    codec: Codecs,
    weights: npt.ArrayLike,
    *,
    gamma: float,
    bucketing: Bucketing = Bucketing(),
    key: jax.Array | int = 0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: CHOCO-SGD, in which each worker trains and averages with its neighbors.

    Worker i has parameters x_i. Worker i and its neighbors store the same copy x̂_i of x_i, updated
    by compressed differences. With W the weights of the graph and C the codec, a step is

        x_i ← x_i + inner(∇f_i(x_i)),
        q_i = C(x_i - x̂_i),   x̂_j ← x̂_j + q_j   for the worker itself and its neighbors j,
        x_i ← x_i + γ Σ_j W_ij (x̂_j - x̂_i).

    A worker sends q_i to each neighbor. Do not chain another optimizer after this one.

    The parameters *differ between the workers*: under `jax.shard_map` they have a leading axis of
    workers, as with `diloco`. All workers must start from the same parameters. Evaluate and save
    the mean over the workers. If the workers' data differ, training with a constant learning rate
    does not reach the optimum. With `beer`, it does.

    Args:
      inner: the optimizer of each worker, with a learning rate, such as
        `optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 100)`.
      codec: C, or a rule from a part to its codec. Use a contraction, such as `TopK`, `Sign` or
        `LogQuantizer`.
      weights: W: `ring(workers)`, `torus(rows, columns)`, or another symmetric matrix of weights
        >= 0 with rows that sum to 1.
      gamma: γ in (0, 1]: 1.0 for a lossless codec, smaller for a lossy one. A large γ diverges.
      bucketing: groups of leaves that are compressed together; see `Bucketing`.
      key: seed or PRNG key of random codecs, equal on all workers.
      axis_name: the axis, or axes, of the workers.

    Shapes: for any number of neighbors, a worker stores three float32 vectors of the size of the
      parameters: x̂_i, Σ_j (x̂_j - x̂_i) over its neighbors j, and the rounding error of this sum.

    Wire: one buffer of `fg.wire_bytes(codec, params, bucketing)` bytes to each neighbor.

    Claims: the mean of the parameters moves by the mean of the updates of `inner`, up to rounding.
      If x_i is not finite, worker i and its neighbors keep x̂_i and increment `skipped`. x_i itself
      stays not finite. To continue, or to change the number of workers, make a new state from the
      mean of the finite parameters.

    Differs from the paper: copies start with the common initial parameters, not with zero.

    Raises:
      ValueError: while tracing, if `params` are missing or replicated, if `update` gets a `weight`,
        or if the weights do not fit the number of workers.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> import optax
      >>> tx = gossip.choco_sgd(optax.sgd(1.0), fg.codecs.Identity(), gossip.ring(3), gamma=1.0)
      >>> step = lambda grad, x: x + tx.update(grad, tx.init(jnp.zeros(1)), x)[0]
      >>> grads = jnp.array([[-1.0], [-2.0], [-6.0]])  # on a ring of 3, all are neighbors
      >>> jax.vmap(step, axis_name="data")(grads, jnp.zeros((3, 1))).ravel()
      Array([3., 3., 3.], dtype=float32)

    References:
      Koloskova et al., ICML 2019, arXiv:1902.00340; ICLR 2020, arXiv:1907.09356.
    """
    check_transformation("choco_sgd(inner)", inner)
    links = Gossip("choco_sgd", (codec,), weights, gamma, key, axis_name, bucketing)

    def init(params: optax.Params) -> ChocoState:
        checked_like(params, "choco_sgd")
        return ChocoState(
            step=jnp.zeros((), jnp.int32),
            inner=add_worker_axis(inner.init(params)),
            neighbors=links.init((_links.wide(params),), params),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ChocoState]:
        x: Any = links.checked(updates, params, **extra)
        run = optax.with_extra_args_support(inner).update
        moves, own = run(updates, drop_worker_axis(state.inner), x, **extra)
        local = _links.wide(optax.apply_updates(x, moves))
        (copied,), neighbors = links.tell((local,), state.neighbors, state.step)
        moves = links.drawn(moves, copied)
        return moves, ChocoState(_count.next_step(state.step), add_worker_axis(own), neighbors)

    return optax.GradientTransformationExtraArgs(init, _axes.without_explicit(update))


class Estimate(NamedTuple):
    """A worker's estimate of the mean gradient."""

    of_all: Any  # estimate v of the mean gradient
    own: Any  # this worker's last gradient


class BeerState(NamedTuple):
    """State of `beer`."""

    step: jax.Array  # number of updates, int32, equal on all workers
    inner: PerWorker  # state of each worker's inner optimizer
    estimate: PerWorker  # `Estimate` of each worker, float32
    neighbors: PerWorker  # `Links` of each worker, with v and the parameters as trees


def beer(
    inner: optax.GradientTransformation,
    codec: Codecs,
    weights: npt.ArrayLike,
    *,
    gamma: float,
    gradients: Codecs | None = None,
    bucketing: Bucketing = Bucketing(),
    key: jax.Array | int = 0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: BEER, in which workers gossip parameters and estimates of the mean gradient.

    Worker i has parameters x_i and an estimate v_i of the mean gradient. Worker i and its neighbors
    store the same copies x̂_i and v̂_i. With W the weights of the graph and C the codec, a step is

        v_i ← v_i + γ Σ_j W_ij (v̂_j - v̂_i) + ∇f_i(x_i) - (∇f_i(x_i) of the step before),
        v̂_j ← v̂_j + C(v_j - v̂_j),
        x_i ← x_i + γ Σ_j W_ij (x̂_j - x̂_i) + inner(v_i),
        x̂_j ← x̂_j + C(x_j - x̂_j).

    One buffer contains both compressed differences. The mean of all v_i is the mean gradient. So
    with exact gradients, BEER converges linearly to the optimum of a strongly convex function, even
    for different data on the workers, a lossy codec and a constant learning rate.

    The parameters differ between the workers: see `choco_sgd`. `DynamicSign` as the codec sends one
    bit for each value, as Dyna-COLD does. The update rule of COLD is not implemented, because the
    text of its paper was not available.

    Args:
      inner: the optimizer that gets v_i as gradient. The paper uses `optax.sgd(η)`.
      codec: C, or a rule from a part to its codec. Use a contraction.
      weights: W, as for `choco_sgd`.
      gamma: γ in (0, 1], about `largest_gamma(weights)` times the share of the energy that the
        codec keeps. `largest_gamma` is 0.75 on a ring of 8 and 0.67 on a torus of 2 x 4. With a
        larger γ, smaller learning rates diverge.
      gradients: another codec for v_i - v̂_i, such as a `DynamicSign` of another scale.
      bucketing: groups of leaves that are compressed together; see `Bucketing`.
      key: seed or PRNG key of random codecs, equal on all workers.
      axis_name: the axis, or axes, of the workers.

    Shapes: for any number of neighbors, a worker stores eight float32 vectors of the size of the
      parameters: x̂_i and v̂_i; Σ_j (x̂_j - x̂_i) and Σ_j (v̂_j - v̂_i), each with its rounding error;
      v_i; and the last ∇f_i.

    Wire: one buffer to each neighbor. With one bucket and one codec, it has
      2 `fg.wire_bytes(codec, params, bucketing)` - 4 bytes, because both trees share the header.

    Claims: the mean of all v_i is the mean gradient of the workers, up to rounding. If a gradient
      is not finite, v_i ignores it, but this worker's update is not finite either, unless `inner`
      is, for example, `optax.apply_if_finite(optax.sgd(η), 100)`. If parameters are not finite, the
      claims of `choco_sgd` hold.

    Differs from the paper: x̂ starts with the common initial parameters, not with zero. A step
      begins with the gradient, as in the authors' code. `inner` may be any optimizer.

    Raises:
      ValueError: in the cases of `choco_sgd`.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> import optax
      >>> tx = gossip.beer(optax.sgd(0.5), fg.Sign(), gossip.ring(4), gamma=0.5)
      >>> @jax.jit
      ... @lambda step: jax.vmap(step, axis_name="data")
      ... def step(x, state, target):  # the optimum is the mean target
      ...     moves, state = tx.update(x - target, state, x)
      ...     return x + moves, state
      >>> target, x = jnp.array([[0.0], [1.0], [2.0], [9.0]]), jnp.zeros((4, 1))
      >>> state = jax.vmap(tx.init)(x)
      >>> for _ in range(80):
      ...     x, state = step(x, state, target)
      >>> [f"{value:.3f}" for value in x.ravel()]
      ['3.000', '3.000', '3.000', '3.000']

    References:
      Zhao et al., NeurIPS 2022, arXiv:2201.13320. Zhang et al., (COLD), IEEE TAC 2023,
      arXiv:2105.06697.
    """
    check_transformation("beer(inner)", inner)
    codecs = (codec if gradients is None else gradients, codec)
    links = Gossip("beer", codecs, weights, gamma, key, axis_name, bucketing)

    def init(params: optax.Params) -> BeerState:
        checked_like(params, "beer")
        own = _links.wide(params)
        zeros = jax.tree.map(jnp.zeros_like, own)
        return BeerState(
            step=jnp.zeros((), jnp.int32),
            inner=add_worker_axis(inner.init(params)),
            estimate=add_worker_axis(Estimate(zeros, zeros)),
            neighbors=links.init((zeros, own), params),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, BeerState]:
        x: Any = links.checked(updates, params, **extra)
        tracked, known = _links.copied(state.neighbors)
        before: Estimate = drop_worker_axis(state.estimate)
        drawn = links.drawn(before.of_all, tracked)
        now = Estimate(
            jax.tree.map(lambda v, g, old: v + (g - old), drawn, _links.wide(updates), before.own),
            _links.wide(updates),
        )
        run = optax.with_extra_args_support(inner).update
        narrow = jax.tree.map(lambda v, g: v.astype(g.dtype), now.of_all, updates)
        moves, own = run(narrow, drop_worker_axis(state.inner), x, **extra)
        moves = links.drawn(moves, known)
        after = _links.wide(optax.apply_updates(x, moves))
        # If a gradient is not finite, the update is not finite either, but the estimate is.
        fine = _finite.all_finite(now.own)
        now = optax.tree.where(fine, now, Estimate(drawn, before.own))
        _, neighbors = links.tell((now.of_all, after), state.neighbors, state.step)
        rows = add_worker_axis(own), add_worker_axis(now)
        return moves, BeerState(_count.next_step(state.step), *rows, neighbors)

    return optax.GradientTransformationExtraArgs(init, _axes.without_explicit(update))
