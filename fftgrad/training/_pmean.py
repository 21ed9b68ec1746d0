"""The compressed mean of gradients over an axis, as an optax transformation."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Averaged, AxisName, Comm, Exchange, Memory, PyTree, State, Stats
from fftgrad._values import check, check_choice, check_type
from fftgrad.exchanges import _bucketing, _shards
from fftgrad.exchanges._bucketing import Bucket, Bucketing, Join
from fftgrad.exchanges._recipe import Recipe, recipe_of
from fftgrad.exchanges._shards import PerWorker, add_worker_axis
from fftgrad.ops import _count, _finite, _random, _rounding
from fftgrad.training import _gradients

NonFinite = Literal["propagate", "skip"]


class CompressedPmeanState(NamedTuple):
    """State of `compressed_pmean`.

    `overflow` stops at 2^31 - 1. `step` and `skipped` go on from 2^31 - 1 to about 2^30, not to
    zero, so that schedules do not restart.

    Attributes:
      step: number of updates, int32, equal on all workers.
      skipped: number of bad steps, in which a value was not finite. Such a step does not change
        `memory` and `exchange`.
      overflow: number of values that no codec could represent, over all workers and good steps.
      memory: state of the memory, one for each worker.
      exchange: the exchange's `State`, one for each bucket.
      worker: zeros, int32, one per worker. Their number tells a checkpoint the number of workers.
        () if no worker has a state of its own.
      error: with `track_error`, the relative error of the last good step, float32; else ().
    """

    step: jax.Array
    skipped: jax.Array
    overflow: jax.Array
    memory: PerWorker
    exchange: tuple[State, ...]
    worker: PyTree
    error: PyTree = ()


def compressed_pmean(
    exchange: Exchange | Recipe,
    memory: Memory | None = None,
    *,
    axis_name: AxisName,
    bucketing: Bucketing | None = None,
    allow_masked: bool = False,
    non_finite: NonFinite = "propagate",
    track_error: bool = False,
    key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Transformation: average the gradients of all workers over a compressed link.

    It takes the gradients of one worker's own batch and returns the mean over all workers. The mean
    has the same bits on all devices of one kind. Put it first in the chain, so that clipping and
    weight decay use the mean.

        tx = optax.chain(
            fg.compressed_pmean(fg.AllGather(codec), fg.ErrorFeedback(), axis_name="data"),
            optax.sgd(0.1),
        )

    Do not chain Adam behind error feedback: with PowerSGD the final loss was 11 % higher than with
    dense Adam (docs/results/slow-links.md). Instead use `fg.optimizers.feedback_adam` or
    `feedback_muon`, which are whole optimizers.

    `update` runs inside `jax.shard_map` (with `check_vma` True or False), `jax.pmap`, or
    `jax.vmap(axis_name=...)`. Take gradients by `fg.value_and_grad`, and the state by
    `fg.init_state`. If a transformation with a state must come before it, wrap that one in
    `fg.training.local_state`.

    Args:
      exchange: the collective and its codec, such as `AllGather(codec)`; or a method such as
        `fg.methods.top_k(0.01)`, which is a `Recipe` of exchange, memory and bucketing.
      memory: the memory of values that a step does not send. The default is the memory of the
        recipe, or `NoMemory()` for an exchange.
      axis_name: the axis, or tuple of axes, to average over. If a parameter is sharded over other
        mesh axes, each of its shards is exchanged separately.
      bucketing: which leaves are compressed together, as one vector, and which vectors travel in
        one collective. The default is that of the recipe or exchange, usually one vector of all
        leaves.
      allow_masked: True if another transformation averages the leaves that `optax.masked` or
        `optax.partition` hides from this one. Otherwise masked leaves raise an error.
      non_finite: the mean of a bad step: "propagate" returns a non-finite mean, "skip" zeros.
      track_error: True to store √(Σ ||x - sent||² / Σ ||x||²), with sums over the workers and x the
        gradient plus the residual, in the state. `fg.metrics` returns it as `error`.
      key: a seed below 2^32, or a PRNG key, for codecs that draw random numbers. The numbers of the
        step and of the worker are folded into it.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `CompressedPmeanState`. If its
      `update` gets a scalar `weight=v`, such as the worker's number of tokens, the mean is
      Σ v g / Σ v. Each gradient is multiplied by w v / Σ v, with w workers, before it enters the
      memory. A gradient with v = 0 counts as zero, even if it has a NaN. Under `jax.jit` and over
      an Explicit axis, `update` also takes the unreduced gradient of a global loss, which JAX has
      not yet summed over the devices.

    Shapes: leaves float32, bfloat16 or float16 of any shape; the mean has the dtype of each leaf.
      Memory and exchange use float32. Gradients that you cast to float32 before `update` take the
      same bytes, and their mean is not rounded.

    Wire: `fg.wire_bytes(exchange, params, bucketing)` bytes per worker and step. Each bucket takes
      one collective with `AllReduce`, `AllGather`, `TopVotes` and `AcpSgd`; two with `TwoStage`,
      `PowerSgd`, `QuantizedAllReduce` and `LeaderTopK`. `Hierarchical` takes two more than its slow
      exchange. `track_error` adds 12 bytes in two all-reduces; a weight adds 4 bytes in one.

    Claims: those of the exchange and the memory. If a leaf is narrower than float32, the memory
      keeps the rounding error of the mean; without a memory this error is lost. One worker is
      allowed. A step is bad if a value is not finite, or if the mean exceeds the range of a leaf's
      dtype. A bad step does not change the states of memory and exchange, in any bucket. All
      workers decide alike. With `check_vma=True` JAX checks that the state is sharded over the
      workers. It does not notice if a restored state has its workers in another order.

    Raises:
      ValueError: while tracing, if the axis is not bound, `weight` is not a scalar, a gradient is
        summed already, `params` vary over the axis, a leaf is masked, the state belongs to other
        workers, exchange, memory or bucketing, or if `track_error` is used with an exchange that
        keeps its own residual (`Hierarchical`).
      TypeError: while tracing, if a leaf is not a float array of at most 32 bits.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllGather(fg.TopK(k=1)), axis_name="data")
      >>> step = lambda grad: tx.update(grad, tx.init(grad))[0]
      >>> jax.vmap(step, axis_name="data")({"w": jnp.array([[4.0, 1.0], [1.0, 2.0]])})["w"][0]
      Array([2., 1.], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596, without memory; Stich et al., NeurIPS 2018,
      arXiv:1809.07599, with error feedback.
    """
    recipe = recipe_of("compressed_pmean", exchange, memory, bucketing)
    exchange, memory = recipe.exchange, recipe.memory
    bucketing = recipe.bucketing.for_exchange(exchange)
    _axes.check_names("compressed_pmean(axis_name)", axis_name)
    _random.check_key("compressed_pmean(key)", key)
    check_choice("compressed_pmean(non_finite)", non_finite, get_args(NonFinite))

    def init(params: optax.Params) -> CompressedPmeanState:
        like = _gradients.checked_like(params)
        # Separate buffers, so that a caller may donate the state.
        step, skipped, overflow = (jnp.zeros((), jnp.int32) for _ in range(3))
        remembered = add_worker_axis(memory.init(like))
        states = map(exchange.init, _bucketing.bucket_likes(like, bucketing))
        exchanged = tuple(map(_shards.add_rows, states))
        rows = jax.tree.leaves((remembered, exchanged), is_leaf=_shards.is_rows)
        own = any(_shards.is_rows(row) and jax.tree.leaves(row) for row in rows)
        worker = add_worker_axis(jnp.zeros((), jnp.int32)) if own else ()
        error = jnp.zeros((), jnp.float32) if track_error else ()
        state = CompressedPmeanState(step, skipped, overflow, remembered, exchanged, worker, error)
        # Some wrappers of optax call `init` with placeholders without shapes, from which these two
        # fields cannot be made.
        stands_in = _gradients.stands_in(params)
        return state._replace(exchange=step, worker=step) if stands_in else state

    def inside(state: Any) -> tuple[PyTree, tuple[State, ...], PyTree]:
        """Return the state of one worker: of the memory, of the exchange, and the error."""
        is_ours = hasattr(state, "memory") and hasattr(state, "exchange")
        rule, remedy = "be a CompressedPmeanState", "start from fg.init_state(tx, params, ...)."
        check_type(is_ours, "compressed_pmean(state)", rule, type(state).__name__, remedy)
        own = _shards.drop_worker_axis(state.memory)
        return own, tuple(map(_shards.drop_rows, state.exchange)), state.error

    def check_update(updates: PyTree, state: Any, params: PyTree | None) -> None:
        if not allow_masked:
            _gradients.refuse_masked(updates)
        wanted = jax.eval_shape(lambda leaves: inside(init(leaves)), updates)
        _gradients.check_local(updates, axis_name)
        _gradients.check_replicated(params, axis_name)
        alike = _shapes(inside(state)) == _shapes(wanted)
        rule = f"be made for these gradients, {exchange!r}, {memory!r} and {bucketing!r}"
        remedy = "start from fg.init_state(...), and pass zeros for missing gradients."
        check(alike, "compressed_pmean(state)", rule, "arrays of other shapes", remedy)

    def relative_error(x: PyTree, error: PyTree | None, comm: Comm) -> PyTree:
        rule, got = "be False for an exchange with its own residual", f"True for {exchange!r}"
        remedy = "log the exchange_residual of fg.metrics."
        check(error is not None, "compressed_pmean(track_error)", rule, got, remedy)
        return comm.relative_error(error, x)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        _gradients.refuse_mistyped("compressed_pmean", extra)
        check_update(updates, state, params)
        before, states, old_error = inside(state)
        # Make the key here, because a key starts the backend, and jax.distributed may not be
        # initialized when the transformation is made.
        comm = Comm.of(axis_name, key, state.step)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        x, added = memory.add(_gradients.weighted(grads, weight, axis_name), before)
        buckets, join = _bucketing.to_buckets(_axes.whole(x), bucketing)
        out, after = travel(exchange, buckets, states, comm, join)
        # Keep the values that the others did not receive, and the rounding errors of narrow leaves.
        remembered = memory.update(x, out.error_or_zeros(x), out.mean, added)
        mean, rounded = _rounding.narrowed(out.mean, updates)
        if rounded is not None:
            remembered = memory.restore(rounded, remembered)
        # After a bad step, keep the old states.
        finite = all_finite(out.stats, mean)
        error = relative_error(x, out.error, comm) if track_error else ()
        remembered, after, error = optax.tree.where(
            finite, (remembered, after, error), (before, states, old_error)
        )
        if non_finite == "skip":
            mean = jax.tree.map(lambda m: jnp.where(finite, m, 0), mean)
        counts = counters(state, out.stats, finite)
        rows = add_worker_axis(remembered), tuple(map(_shards.add_rows, after))
        return mean, CompressedPmeanState(*counts, *rows, state.worker, error)

    return optax.GradientTransformationExtraArgs(init, _gradients.in_parts(update, axis_name))


def _shapes(state: tuple[PyTree, tuple[State, ...], PyTree]) -> tuple[int, list[Any]]:
    leaves = jax.tree.leaves(state)
    return len(state[1]), [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def travel(
    exchange: Exchange,
    buckets: list[Bucket],
    states: tuple[State, ...],
    comm: Comm,
    join: Join,
) -> tuple[Averaged, tuple[State, ...]]:
    """Send buckets through an exchange, one after another, and join mean and error.

    `stats.finite` of the result also says if the mean is finite.
    """
    run = exchange.mean
    if len(buckets) > 1:
        # Large models have dozens of buckets. Buckets of equal shapes share one trace.
        mean = jax.jit(lambda x, state, step: exchange.mean(x, state, Comm(comm.axis_name, step)))
        run = lambda x, state, comm: mean(x, state, comm.step)  # noqa: E731
    outs: list[Averaged] = []
    for i, (bucket, state) in enumerate(zip(buckets, states, strict=True)):
        # XLA would schedule the collectives of independent buckets at the end, without overlap. So
        # make each bucket depend on the one before it, by a NaN that XLA cannot rule out.
        if outs:
            bucket = _finite.nan_unless(jnp.asarray(outs[-1].stats.finite), bucket)
        out = run(bucket, state, comm.fold(i))
        finite = jnp.asarray(out.stats.finite) & _finite.all_finite(out.mean)
        outs.append(out._replace(stats=out.stats._replace(finite=finite)))
    errors = [out.error for out in outs if out.error is not None]
    every = Averaged(
        mean=join(_axes.whole([out.mean for out in outs])),
        error=join(_axes.whole(errors)) if len(errors) == len(outs) else None,
        stats=Stats.of_all([out.stats for out in outs]),
    )
    return every, tuple(out.state for out in outs)


def all_finite(stats: Stats, mean: PyTree) -> jax.Array:
    """Return True if the mean, in the leaves' dtypes, is finite on the whole mesh."""
    # A finite float32 mean can overflow only in a narrower dtype.
    leaves = [leaf for leaf in jax.tree.leaves(mean) if leaf.dtype != jnp.float32]
    flag = _axes.everywhere(jnp.asarray(stats.finite) & _finite.all_finite(leaves))
    # XLA would otherwise recompute the flag for every leaf, and compile for minutes.
    return lax.optimization_barrier(flag)


def counters(
    before: Any, stats: Stats, finite: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `step`, `skipped` and `overflow` after a step."""

    def add(count: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # The count of each device is capped, so that the sum does not overflow.
        return lax.psum(jnp.minimum(count, _count.MOST // _axes.size(axes)), axes)

    # A NaN in one bucket propagates to later buckets, so their overflow is meaningless.
    overflow = _axes.over_other_axes(add, jnp.where(finite, stats.overflow, 0))
    skipped = jnp.where(finite, before.skipped, _count.next_step(before.skipped))
    return _count.next_step(before.step), skipped, _count.add(before.overflow, overflow)
