"""Gossip with neighbors of compressed differences, behind any optimizer."""

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
from fftgrad.ops import _count
from fftgrad.training._check_gradients import checked_like

OWNER = "choco_sgd"


class ChocoState(NamedTuple):
    """State of `choco_sgd`.

    Attributes:
      step: how many updates there were, int32, equal on all workers.
      inner: the inner optimizer's state, of which each worker has its own.
      neighbors: the public copy of each worker's parameters, what its neighbors' copies draw it to,
        and counts of what went wrong.
    """

    step: jax.Array
    inner: PerWorker
    neighbors: Linked


def choco_sgd(
    inner: optax.GradientTransformation,
    codec: Codecs,
    graph: Graph,
    *,
    gamma: float,
    layout: Layout = Layout(),
    key: jax.Array | int = 0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: CHOCO-SGD; each worker trains, and averages with its neighbors on a graph.

    With x_i the parameters of worker i, x̂_i the copy of them that all its neighbors hold, and W
    the weights of the graph,

        x_i ← x_i + inner(∇f_i(x_i)),
        q_i = C(x_i - x̂_i),   x̂_j ← x̂_j + q_j   for the worker itself and its neighbors j,
        x_i ← x_i + γ Σ_j W_ij (x̂_j - x̂_i).

    A worker sends once to each neighbor, however many workers there are. It is a whole optimizer.

    The parameters *differ between the workers*: under `jax.shard_map` they have a leading axis of
    workers, as with `diloco`. All start from the same ones; `fg.contrib.gossip.consensus_distance`
    says how far they are apart. Evaluate and save their mean. With a constant learning rate and
    data that differ it ends at a distance from the optimum; `beer` does not.

    A worker keeps three vectors, whatever the degree: x̂_i, Σ_j (x̂_j - x̂_i) over the neighbors,
    and what rounding dropped of that.

    Args:
      inner: the optimizer of each worker, complete with its learning rate, as
        `optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 100)`.
      codec: C, or a rule from a part to its codec. It should be a contraction, as `TopK`, `Sign`
        and `LogLevels` are.
      graph: `Ring()`, `Torus(rows, columns)` or `Exponential()`.
      gamma: γ, above 0 and at most 1: 1.0 for a codec without loss, less for one that loses more.
        Too large a one diverges.
      layout: what is compressed on its own, and what travels at once; see `Layout`.
      key: seed or PRNG key of codecs that draw, equal on all workers.
      axis_name: the axis, or axes, of the workers.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `ChocoState`; it needs `params`,
      the worker's own.

    Wire: `fg.wire_bytes(codec, params, layout)` bytes in one buffer, which is sent to each of
      `graph.degree(workers)` neighbors.

    Claims: the mean of the parameters moves by the mean of what `inner` says, up to rounding. A
      worker whose parameters are not finite sends nothing: it and its neighbors leave its copy as
      it was and count that in `skipped`. Its own parameters stay NaN. An altered buffer makes the
      receiver's parameters NaN, because the copies no longer agree, and counts in `invalid`. Then,
      and for another number of workers, make a new state from the mean of the finite parameters.

    Differs from the paper: copies start as the common first parameters, not as zero.

    Raises:
      ValueError: if `gamma` is out of its range; while tracing, if `params` is missing or not a
        worker's own, `update` gets a `weight`, or the graph does not fit the number of workers.
      TypeError: if `codec` is no codec, or `graph` no graph.

    Example:
      >>> from fftgrad.contrib import gossip
      >>> import optax
      >>> tx = gossip.choco_sgd(optax.sgd(1.0), fg.Identity(), gossip.Ring(), gamma=1.0)
      >>> step = lambda grad, x: x + tx.update(grad, tx.init(jnp.zeros(1)), x)[0]
      >>> grads = jnp.array([[-1.0], [-2.0], [-6.0]])  # of three workers, that all hear each other
      >>> jax.vmap(step, axis_name="data")(grads, jnp.zeros((3, 1))).ravel()
      Array([3., 3., 3.], dtype=float32)

    References:
      Koloskova et al., ICML 2019, arXiv:1902.00340; ICLR 2020, arXiv:1907.09356.
    """
    check_transformation(f"{OWNER}(inner)", inner)
    _gossip.check(OWNER, (codec,), graph, gamma, axis_name, key)
    layout = _gossip.layout_of(layout, codec)

    def init(params: optax.Params) -> ChocoState:
        checked_like(params, OWNER)
        return ChocoState(
            step=jnp.zeros((), jnp.int32),
            inner=add_worker_axis(inner.init(params)),
            neighbors=_gossip.start((codec,), (_gossip.wide(params),), params, layout),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ChocoState]:
        x: Any = _gossip.check_call(OWNER, updates, params, graph, axis_name, **extra)
        run = optax.with_extra_args_support(inner).update
        moves, own = run(updates, drop_worker_axis(state.inner), x, **extra)
        local = _gossip.wide(optax.apply_updates(x, moves))
        (copied,), neighbors = _gossip.tell(
            (codec,),
            (local,),
            state.neighbors,
            state.step,
            graph=graph,
            key=key,
            axis_name=axis_name,
            layout=layout,
        )
        moves = _gossip.with_pull(moves, _gossip.share(graph, gamma, axis_name), copied)
        return moves, ChocoState(_count.next_step(state.step), add_worker_axis(own), neighbors)

    return optax.GradientTransformationExtraArgs(init, _axes.without_explicit(update))
