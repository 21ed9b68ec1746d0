"""Gossip of parameters and of tracked gradients, both compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fftgrad import _axes
from fftgrad._contracts import AxisName
from fftgrad._values import check_transformation
from fftgrad.contrib import _linked as _gossip
from fftgrad.contrib._graphs import Graph
from fftgrad.contrib._linked import Linked
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _count, _finite
from fftgrad.training._check_gradients import checked_like

OWNER = "beer"


class Estimate(NamedTuple):
    """What a worker has of the mean gradient.

    Attributes:
      of_all: v, its estimate.
      own: its own gradient, from which v moves on.
    """

    of_all: Any
    own: Any


class BeerState(NamedTuple):
    """State of `beer`.

    Attributes:
      step: how many updates there were, int32, equal on all workers.
      inner: the inner optimizer's state, of which each worker has its own.
      estimate: of the mean gradient, by each worker, and its own last gradient, float32.
      neighbors: the public copies of each worker's tracked gradient and of its parameters, what its
        neighbors' copies draw these to, and counts of what went wrong.
    """

    step: jax.Array
    inner: PerWorker
    estimate: PerWorker
    neighbors: Linked


def beer(
    inner: optax.GradientTransformation,
    codec: Codecs,
    graph: Graph,
    *,
    gamma: float,
    gradients: Codecs | None = None,
    layout: Layout = Layout(),
    key: jax.Array | int = 0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: BEER; gossip of the parameters and of a gradient that tracks that of all.

    With x_i the parameters of worker i, v_i its estimate of the mean gradient, x̂_i and v̂_i the
    copies of both that its neighbors hold, and W the weights of the graph, step t is

        v_i ← v_i + γ Σ_j W_ij (v̂_j - v̂_i) + ∇f_i(x_i) - (∇f_i(x_i) of the step before),
        v̂_j ← v̂_j + C(v_j - v̂_j),
        x_i ← x_i + γ Σ_j W_ij (x̂_j - x̂_i) + inner(v_i),
        x̂_j ← x̂_j + C(x_j - x̂_j),

    where both C travel in one buffer. The mean of the v_i is the mean gradient. So, unlike
    `choco_sgd`, it converges linearly to the optimum where the workers' data differ, with exact
    gradients of a strongly convex function, a constant learning rate and a lossy codec.

    The parameters differ between the workers, as with `choco_sgd`, whose remarks on that hold here.
    A worker keeps eight vectors, whatever the degree: x̂ and v̂; the pulls of the neighbors on x
    and v, each with what rounding dropped of it; v, and the last ∇f.

    With `DynamicSign` for the codecs one bit of a value travels, as in Dyna-COLD. COLD's own update
    is not reproduced: its text was not at hand.

    Args:
      inner: what is done with v, with the learning rate η in it: `optax.sgd(η)` is the paper's.
      codec: C, or a rule from a part to its codec; a contraction.
      graph: `Ring()`, `Torus(rows, columns)` or `Exponential()`.
      gamma: γ, in (0, 1]: `graph.largest_gamma(workers)`, 0.75 on a ring of 8 and 0.67 on a torus
        of 2 x 4, times about the share of the energy that the codec keeps. With λ the smallest
        eigenvalue of W, differences between workers change their sign where γ (1 - λ) > 1: 1.0
        diverges at smaller learning rates.
      gradients: another C for the tracked gradients, such as a `DynamicSign` of another scale.
      layout: what is compressed on its own, and what travels at once; see `Layout`.
      key: seed or PRNG key of codecs that draw, equal on all workers.
      axis_name: the axis, or axes, of the workers.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `BeerState`; it needs `params`,
      the worker's own.

    Wire: twice what `fg.wire_bytes(codec, params, layout)` counts, less 8 bytes for the one header
      of both, in one buffer, which is sent to each of `graph.degree(workers)` neighbors.

    Claims: the mean over the workers of what `inner` gets is the mean of their gradients, up to
      rounding. A gradient that is not finite makes this worker's update so, unless `inner` leaves
      it out, as `optax.apply_if_finite(optax.sgd(η), 100)` does; the estimate keeps its last value.
      The claims of `choco_sgd` on parameters that are not finite and altered buffers hold here.

    Differs from the paper: x̂ starts as the common first parameters, not as zero; steps begin with
      the gradient, as in the authors' code; `inner` may be any optimizer.

    Raises:
      ValueError: if `gamma` is out of its range; while tracing, if `params` is missing or not a
        worker's own, `update` gets a `weight`, or the graph does not fit the number of workers.
      TypeError: if `codec` or `gradients` is no codec, or `graph` no graph.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> import optax
      >>> tx = gossip.beer(optax.sgd(0.5), fg.Sign(), gossip.Ring(), gamma=0.5)
      >>> @jax.jit
      ... @lambda step: jax.vmap(step, axis_name="data")
      ... def step(x, state, target):  # half the squared distance: the optimum is the mean target
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
    check_transformation(f"{OWNER}(inner)", inner)
    codecs = (codec if gradients is None else gradients, codec)
    _gossip.check(OWNER, codecs, graph, gamma, axis_name, key)
    layout = _gossip.layout_of(layout, codec)

    def init(params: optax.Params) -> BeerState:
        checked_like(params, OWNER)
        own = _gossip.wide(params)
        zeros = jax.tree.map(jnp.zeros_like, own)
        return BeerState(
            step=jnp.zeros((), jnp.int32),
            inner=add_worker_axis(inner.init(params)),
            estimate=add_worker_axis(Estimate(zeros, zeros)),
            neighbors=_gossip.start(codecs, (zeros, own), params, layout),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, BeerState]:
        x: Any = _gossip.check_call(OWNER, updates, params, graph, axis_name, **extra)
        tracked, known = _gossip.copied(state.neighbors)
        share = _gossip.share(graph, gamma, axis_name)
        before: Estimate = drop_worker_axis(state.estimate)
        drawn = _gossip.with_pull(before.of_all, share, tracked)
        now = Estimate(
            jax.tree.map(lambda v, g, old: v + (g - old), drawn, _gossip.wide(updates), before.own),
            _gossip.wide(updates),
        )
        run = optax.with_extra_args_support(inner).update
        narrow = jax.tree.map(lambda v, g: v.astype(g.dtype), now.of_all, updates)
        moves, own = run(narrow, drop_worker_axis(state.inner), x, **extra)
        moves = _gossip.with_pull(moves, share, known)
        after = _gossip.wide(optax.apply_updates(x, moves))
        # A gradient that is not finite is seen in the update, and forgotten.
        fine = _finite.all_finite(now.own)
        now = optax.tree.where(fine, now, Estimate(drawn, before.own))
        _, neighbors = _gossip.tell(
            codecs,
            (now.of_all, after),
            state.neighbors,
            state.step,
            graph=graph,
            key=key,
            axis_name=axis_name,
            layout=layout,
        )
        rows = add_worker_axis(own), add_worker_axis(now)
        return moves, BeerState(_count.next_step(state.step), *rows, neighbors)

    return optax.GradientTransformationExtraArgs(init, _axes.without_explicit(update))
