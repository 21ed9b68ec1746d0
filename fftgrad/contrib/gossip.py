"""Gossip: workers average with their neighbors on a graph instead of with all workers.

A graph is a symmetric, doubly stochastic matrix of weights [workers, workers]. The weight in row i
and column j is the share by which worker i moves towards worker j.
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

    All weights are 1/3; with two workers 1/2. The spectral gap 1 - |λ₂| is inversely proportional
    to the square of the number of workers: 0.20 for 8, 0.051 for 16, 0.0032 for 64.

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

    Worker i is in row i // columns and column i % columns, as on a mesh of these two axes. Rows and
    columns are rings. All weights are 1/5, or larger if a ring has only one or two workers.

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
    """Function: compute 1 / (1 - λ) for the smallest eigenvalue λ of the weights, at most 1.

    A round multiplies differences between workers by 1 - γ (1 - λ) or more. Up to this γ, no
    difference changes its sign.

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
    """Return the adjacency matrix of a ring."""
    eye = np.eye(check_count("gossip(workers)", workers, "use that of the axis."))
    return np.maximum(np.roll(eye, 1, axis=1), np.roll(eye, -1, axis=1)) * (1 - eye)


def _equal(hears: Weights) -> Weights:
    """Give a worker and each of its neighbors the same weight."""
    out = (hears > 0) + np.eye(len(hears))
    return out / out.sum(1, keepdims=True)


class ChocoState(NamedTuple):
    """State of `choco_sgd`."""

    step: jax.Array  # number of updates, int32, equal on all workers
    inner: PerWorker  # each worker's own state of the inner optimizer
    neighbors: PerWorker  # public copies of the parameters, pulls of the neighbors, and counters


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

    With x_i the parameters of worker i, x̂_i the copy of x_i at all its neighbors, and W the weights
    of the graph,

        x_i ← x_i + inner(∇f_i(x_i)),
        q_i = C(x_i - x̂_i),   x̂_j ← x̂_j + q_j   for the worker itself and its neighbors j,
        x_i ← x_i + γ Σ_j W_ij (x̂_j - x̂_i).

    A worker sends one message to each neighbor. This is a complete optimizer.

    The parameters *differ between the workers*: under `jax.shard_map` they have a leading axis of
    workers, as with `diloco`. All workers must start from the same parameters. Evaluate and save
    their mean. If the workers' data differ, a constant learning rate converges to a distance from
    the optimum; `beer` converges to the optimum.

    Args:
      inner: the optimizer of each worker with its learning rate, such as
        `optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 100)`.
      codec: C, or a rule from a part to its codec. Use a contraction, such as `TopK`, `Sign` or
        `LogQuantizer`.
      weights: W: `ring(workers)`, `torus(rows, columns)`, or another symmetric matrix of weights
        >= 0 with rows that sum to 1.
      gamma: γ in (0, 1]: 1.0 for a lossless codec, less for others. Training diverges if γ is too
        large.
      bucketing: groups of leaves that are compressed together; see `Bucketing`.
      key: seed or PRNG key of random codecs, equal on all workers.
      axis_name: the axis, or axes, of the workers.

    Shapes: three vectors a worker for any degree: x̂_i, Σ_j (x̂_j - x̂_i) over the neighbors, and
      the rounding error of this sum.

    Wire: one buffer of `fg.wire_bytes(codec, params, bucketing)` bytes to each neighbor.

    Claims: the mean of the parameters moves by the mean of the updates of `inner`, up to rounding.
      A worker whose parameters are not finite sends nothing. Then this worker and its neighbors
      keep its copy and increment `skipped`, and its own parameters stay NaN. In this case, and for
      another number of workers, make a new state from the mean of the finite parameters.

    Differs from the paper: copies start with the common initial parameters, not with zero.

    Raises:
      ValueError: while tracing, if `params` are missing or not a worker's own; if `update` gets a
        `weight`; or if the weights do not fit the number of workers.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> import optax
      >>> tx = gossip.choco_sgd(optax.sgd(1.0), fg.Identity(), gossip.ring(3), gamma=1.0)
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

    of_all: Any  # v, the estimate
    own: Any  # the worker's last gradient


class BeerState(NamedTuple):
    """State of `beer`: that of `choco_sgd`, also for the tracked gradient, and `estimate`."""

    step: jax.Array
    inner: PerWorker
    estimate: PerWorker  # float32
    neighbors: PerWorker


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
    """Optimizer: BEER, in which workers gossip their parameters and tracked mean gradients.

    With x_i the parameters of worker i, v_i its estimate of the mean gradient, x̂_i and v̂_i the
    copies of both at its neighbors, and W the weights of the graph, step t is

        v_i ← v_i + γ Σ_j W_ij (v̂_j - v̂_i) + ∇f_i(x_i) - (∇f_i(x_i) of the step before),
        v̂_j ← v̂_j + C(v_j - v̂_j),
        x_i ← x_i + γ Σ_j W_ij (x̂_j - x̂_i) + inner(v_i),
        x̂_j ← x̂_j + C(x_j - x̂_j),

    and one buffer contains both compressed differences. The mean of the v_i is the mean gradient.
    So with exact gradients, BEER converges linearly to the optimum of a strongly convex function,
    even if the workers' data differ, the codec is lossy and the learning rate constant.

    The parameters differ between the workers: see `choco_sgd`. With `DynamicSign` as codec, one bit
    of a value travels, as in Dyna-COLD. The update of COLD is not reproduced, because its text was
    not available.

    Args:
      inner: the optimizer of v with the learning rate η. The paper uses `optax.sgd(η)`.
      codec: C, or a rule from a part to its codec. Use a contraction.
      weights: W, as for `choco_sgd`.
      gamma: γ in (0, 1], about `largest_gamma(weights)` times the share of the energy that the
        codec keeps. `largest_gamma` is 0.75 on a ring of 8 and 0.67 on a torus of 2 x 4. With a
        larger γ, smaller learning rates diverge.
      gradients: another C for the tracked gradients, such as a `DynamicSign` of another scale.
      bucketing: groups of leaves that are compressed together; see `Bucketing`.
      key: seed or PRNG key of random codecs, equal on all workers.
      axis_name: the axis, or axes, of the workers.

    Shapes: eight vectors a worker for any degree: x̂ and v̂; the pulls of the neighbors on x and v,
      each with its rounding error; v, and the last ∇f.

    Wire: one buffer to each neighbor, with twice the bytes of
      `fg.wire_bytes(codec, params, bucketing)` minus 4 for the common header.

    Claims: the mean of the v_i is the mean gradient of the workers, up to rounding. If a gradient
      is not finite, this worker's update is not finite either, unless `inner` skips it, such as
      `optax.apply_if_finite(optax.sgd(η), 100)`. The estimate then keeps its last value. For
      parameters that are not finite, the claims of `choco_sgd` hold.

    Differs from the paper: x̂ starts with the common initial parameters, not with zero; steps begin
      with the gradient, as in the authors' code; `inner` may be any optimizer.

    Raises:
      ValueError: as `choco_sgd`.

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
        # A gradient that is not finite affects this update, but not the estimate.
        fine = _finite.all_finite(now.own)
        now = optax.tree.where(fine, now, Estimate(drawn, before.own))
        _, neighbors = links.tell((now.of_all, after), state.neighbors, state.step)
        rows = add_worker_axis(own), add_worker_axis(now)
        return moves, BeerState(_count.next_step(state.step), *rows, neighbors)

    return optax.GradientTransformationExtraArgs(init, _axes.without_explicit(update))
