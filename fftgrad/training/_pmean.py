"""The compressed mean of gradients over an axis, as an optax transformation."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import (
    Averaged,
    AxisName,
    Comm,
    Exchange,
    Memory,
    PyTree,
    State,
    Stats,
    Step,
)
from fftgrad._values import check_choice
from fftgrad.exchanges import _bucketing
from fftgrad.exchanges._bucketing import Bucket, Bucketing, Part
from fftgrad.exchanges._recipe import Recipe, recipe_of
from fftgrad.exchanges._shards import (
    PerWorker,
    add_rows,
    add_worker_axis,
    drop_rows,
    drop_worker_axis,
    is_rows,
)
from fftgrad.ops import _count, _finite, _random, _rounding
from fftgrad.training import _gradients
from fftgrad.training._gradients import (
    check_local,
    check_replicated,
    checked_like,
    refuse_masked,
    refuse_mistyped,
    stands_in,
    weighted,
)

NonFinite = Literal["propagate", "skip"]


class CompressedPmeanState(NamedTuple):
    """State of `compressed_pmean`.

    Counts stay at 2^31 - 1. `step` and `skipped` go on from 2^30 after that, so that a schedule
    does not start again and each step draws other numbers.

    Attributes:
      step: how many updates there were, int32, equal on all workers.
      skipped: in how many of them something was not finite, and memory and exchange were left as
        they were.
      overflow: how many values no codec could represent, over all workers and unskipped steps.
      memory: the memory's state, of which each worker has its own.
      exchange: the exchange's `State`, one for each bucket.
      worker: a zero for each worker, int32, so that a checkpoint knows how many there are where all
        else is sharded over model axes too; () where no worker has anything of its own.
      error: with `track_error`, the relative error of what was sent in the last step in which all
        was finite, float32; else ().
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
    """Transformation: `jax.lax.pmean` of the gradients over an axis, compressed.

    Takes the gradients of one worker's own batch, returns their mean over the workers, the same
    bits on all of them. It goes first in the chain: clipping, momentum and weight decay after it
    see the mean, as they would without compression.

    All leaves make one vector, so a selector chooses over the whole model and a quantizer has one
    scale, unless the exchange is made for other parts or `bucketing` says otherwise. An exchange
    that is given a rule in place of a codec may treat each part differently.

        tx = optax.chain(
            fg.compressed_pmean(fg.AllGather(codec), fg.ErrorFeedback(), axis_name="data"),
            optax.sgd(0.1),
        )

    Behind error feedback an Adam with its usual momentum ended 11 % above dense Adam
    (docs/results/slow-links.md): use `fg.optimizers.feedback_adam` or `feedback_muon` in place of
    both.

    `update` runs inside `jax.shard_map` (with `check_vma` True or False), `jax.pmap`, or
    `jax.vmap(axis_name=...)`, on gradients by `fg.value_and_grad` and a state by `fg.init_state`:

        state = fg.init_state(tx, params, mesh, "data")
        specs = fg.state_specs(state, "data")

    The gradients are those of one worker, so a transformation with a state that comes before it,
    such as `optax.scale_by_adam()`, needs `fg.local_state` around it.

    Args:
      exchange: how payloads travel and are averaged: `AllReduce`, `AllGather`, `Scheduled`, ...; or
        a method, `fg.methods.top_k(0.01)`, which is a `Recipe` of exchange, memory and bucketing.
      memory: what is done with what a step does not send; nothing, or the recipe's, if left out.
      axis_name: the axis, or tuple of axes, over which to average; other mesh axes are left alone,
        so each shard of a sharded parameter exchanges its own piece.
      bucketing: what is compressed on its own, and what travels at once. If left out, the recipe's,
        or what the exchange is made for.
      allow_masked: whether leaves may be hidden from it by `optax.masked` or `optax.partition`,
        because another transformation averages them. If not, they are refused.
      non_finite: what becomes of a gradient that is not finite: "propagate" shows it to all as a
        mean that is not finite, "skip" returns zeros for that mean.
      track_error: whether the state keeps √(Σ ||x - sent||² / Σ ||x||²) over the workers, x being
        the gradient with what the memory added: `error` in `fg.metrics`.
      key: seed below 2^32 or PRNG key of codecs that draw; the step and the worker are folded in.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `CompressedPmeanState`. Its
      `update` takes `weight=tokens`, a scalar, for the mean Σ v g / Σ v: each gradient is
      multiplied by w v / Σ v before a memory sees it, and left out if v is 0, be it NaN. Those of
      `value_and_grad(has_weight=True)` are weighed already. Under `jax.jit` it also takes global
      gradients that are typed as unreduced over an Explicit axis, and returns their sum.

    Shapes: leaves float32, bfloat16 or float16 of any shape; the mean is rounded to each leaf's
      dtype. Memory and exchange work in float32, so gradients that are cast to float32 before it
      cost no more bytes, and have a mean that is not rounded.

    Wire: `fg.wire_bytes(exchange, params, bucketing)` bytes a worker and step. Parts of a bucket
      travel together: in one collective of `AllReduce`, `AllGather`, `TopVotes` and `AcpSgd`; in
      two of `TwoStage`, `PowerSgd`, `QuantizedAllReduce` and `LeaderTopK`; in two of `Hierarchical`
      and those of its slow exchange. By default there is a bucket for every 2^30 parameters.
      `track_error` adds 12 bytes, in two all-reduces, and a weight 4.

    Claims: those of the exchange and the memory. What rounding to a leaf's dtype drops of the mean
      goes back to the memory, which sends it later; without memory it is lost. An axis of one
      worker is no error: the mean is what that worker would have sent. A step with a NaN or an
      infinity anywhere gives a non-finite mean on all workers, as pmean does, and leaves no trace:
      the memory and the state of the exchange, of all buckets, stay as they were. So does a mean
      that is beyond the range of a leaf's dtype. `optax.apply_if_finite` after it then skips the
      step on all workers alike; with "skip" it takes the zeros for a gradient, and Adam's moments
      decay. That a state is this worker's own is JAX's to check, with `check_vma=True`: rows in
      another order are not seen.

    Raises:
      ValueError: if `non_finite` is none of these; while tracing, if the axis is not
        bound, if `weight` is no scalar, if a gradient does not vary over the axis (it is summed
        already), if `params` are known to vary over it (they are sharded over it), if a leaf is
        masked, if the state is not sharded over the workers, or is that of another exchange, memory
        or bucketing, or if `track_error` is to see the error of an exchange that keeps it itself
        (`Hierarchical`).
      TypeError: if `exchange` or `memory` is none, or `axis_name` no name; while tracing, if a leaf
        is not a floating-point array of at most 32 bits.

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
        like = checked_like(params)
        # Each in a buffer of its own, so that a caller may donate the state.
        step, skipped, overflow = (jnp.zeros((), jnp.int32) for _ in range(3))
        remembered = add_worker_axis(memory.init(like))
        states = map(exchange.init, _bucketing.bucket_likes(like, bucketing))
        exchanged = tuple(map(add_rows, states))
        state = CompressedPmeanState(
            *(step, skipped, overflow, remembered, exchanged),
            worker=_row(remembered, exchanged),
            error=jnp.zeros((), jnp.float32) if track_error else (),
        )
        # Without parameters nobody knows what is in these two, but that they are no parameters.
        return state._replace(exchange=step, worker=step) if stands_in(params) else state

    def inside(state: Any) -> tuple[PyTree, tuple[State, ...], PyTree]:
        """What one worker has: the states of memory and exchange, and the error."""
        if not hasattr(state, "memory") or not hasattr(state, "exchange"):
            raise TypeError(
                "compressed_pmean(state): must be a CompressedPmeanState, got "
                f"{type(state).__name__}; start from fg.init_state(tx, params, mesh, axis_name)."
            )
        own = drop_worker_axis(state.memory)
        return own, tuple(map(drop_rows, state.exchange)), state.error

    def check(updates: PyTree, state: Any, params: PyTree | None) -> None:
        """Refuses what `update` cannot exchange."""
        if not allow_masked:
            refuse_masked(updates)
        wanted = jax.eval_shape(lambda leaves: inside(init(leaves)), updates)
        check_local(updates, axis_name)
        check_replicated(params, axis_name)
        found = inside(state)
        if len(found[1]) != len(wanted[1]) or _shapes(found) != _shapes(wanted):
            raise ValueError(
                f"compressed_pmean(state): must be what init makes of these gradients for "
                f"{exchange!r}, {memory!r} and {bucketing!r}, got arrays of other shapes; start "
                "from fg.init_state(tx, params, mesh, axis_name), and pass zeros for what has no "
                "gradient."
            )

    def error_of(x: PyTree, error: PyTree | None, comm: Comm) -> Any:
        if track_error and error is None:
            raise ValueError(
                "compressed_pmean(track_error): must be False for an exchange that keeps what it "
                f"loses itself, got True for {exchange!r}; log the exchange_residual of fg.metrics."
            )
        return comm.relative_error(error, x) if track_error else ()

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        refuse_mistyped("compressed_pmean", extra)
        check(updates, state, params)
        before, states, _ = inside(state)
        # Here and not above: making a key starts the backend, and a transformation may be made
        # before jax.distributed is initialized.
        comm = Comm.of(axis_name, key, state.step)

        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        grads = weighted(grads, weight, axis_name)
        x, added = memory.add(grads, before)
        out, after = travel(exchange, x, states, comm, bucketing)
        remembered = memory.update(x, out.error_or_zeros(x), out.mean, added)
        mean, rounded = _rounding.narrowed(out.mean, updates)
        if rounded is not None:
            remembered = memory.restore(rounded, remembered)

        finite = all_finite(out.stats, mean)
        remembered, states, error = optax.tree.where(
            finite,
            (remembered, after, error_of(x, out.error, comm)),
            (before, states, state.error),
        )
        return hide_bad(non_finite, finite, mean), CompressedPmeanState(
            **counters(state, out.stats, finite),
            memory=add_worker_axis(remembered),
            exchange=tuple(map(add_rows, states)),
            worker=state.worker,
            error=error,
        )

    return optax.GradientTransformationExtraArgs(init, _gradients.in_parts(update, axis_name))


def _row(*states: PyTree) -> PyTree:
    nodes = jax.tree.leaves(states, is_leaf=is_rows)
    own = any(is_rows(node) and jax.tree.leaves(node) for node in nodes)
    return add_worker_axis(jnp.zeros((), jnp.int32)) if own else ()


def _shapes(tree: PyTree) -> list[Any]:
    return [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]


def travel(
    exchange: Exchange, x: PyTree, states: tuple[State, ...], comm: Comm, bucketing: Bucketing
) -> tuple[Averaged, tuple[State, ...]]:
    """A float32 tree through an exchange, bucket by bucket, and the next states of the buckets.

    `stats.finite` of the result says whether the mean is finite, too.
    """
    buckets, join = _bucketing.to_buckets(_axes.whole(x), bucketing)
    run = _traced_once(exchange, comm.axis_name) if len(buckets) > 1 else exchange.mean
    outs: list[Averaged] = []
    for i, (bucket, state) in enumerate(zip(buckets, states, strict=True)):
        # One after the other: a scheduler that may work on many at a time puts all their
        # collectives at the end, where nothing is left to run beside them. What is bad in one
        # bucket is so in the next, a dependency that no compiler may drop.
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


def _traced_once(exchange: Exchange, axis_name: AxisName) -> Callable[..., Averaged]:
    """`exchange.mean`, traced once for buckets that are alike; a large model has dozens."""

    @jax.jit
    def mean(parts: Bucket, state: State, step: Step) -> Averaged:
        return exchange.mean(parts, state, Comm(axis_name, step))

    def run(bucket: Bucket, state: State, comm: Comm) -> Averaged:
        out = mean(_alike(bucket), _alike(state), comm.step)

        def back(like: PyTree, tree: PyTree) -> PyTree:
            return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))

        error = None if out.error is None else back(bucket, out.error)
        return Averaged(back(bucket, out.mean), error, back(state, out.state), out.stats)

    return run


def _alike(tree: PyTree) -> PyTree:
    """The same whatever pieces of their groups its parts are, which the bucketing alone reads."""

    def first(node: Any) -> Any:
        return dataclasses.replace(node, piece=0) if isinstance(node, Part) else node

    return jax.tree.map(first, tree, is_leaf=lambda node: isinstance(node, Part))


def all_finite(stats: Stats, mean: PyTree) -> jax.Array:
    """Whether a step was finite in all buckets, on the whole mesh, and in the leaves' dtypes."""
    # Only a narrower dtype can be left by a mean that was finite.
    leaves = [leaf for leaf in jax.tree.leaves(mean) if leaf.dtype != jnp.float32]
    flag = _axes.everywhere(jnp.asarray(stats.finite) & _finite.all_finite(leaves))
    # Kept: every leaf of the state would find it again, which takes XLA minutes for many leaves.
    return lax.optimization_barrier(flag)


def hide_bad(policy: NonFinite, finite: jax.Array, mean: PyTree) -> PyTree:
    """What a step returns for its mean: zeros for a bad one, unless that is to be seen."""
    if policy == "propagate":
        return mean
    return jax.tree.map(lambda m: jnp.where(finite, m, 0), mean)


def counters(before: Any, stats: Stats, finite: jax.Array) -> dict[str, jax.Array]:
    """The counters of a state after a step."""
    # What is bad in one bucket makes all later ones so, whose values then count for nothing.
    overflow = _axes.over_other_axes(_sum, jnp.where(finite, stats.overflow, 0))
    return {
        "step": _count.next_step(before.step),
        "skipped": jnp.where(finite, before.skipped, _count.next_step(before.skipped)),
        "overflow": _count.add(before.overflow, overflow),
    }


def _sum(count: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum a count over mesh axes. Each device has an equal share of the largest count at most."""
    return lax.psum(jnp.minimum(count, _count.MOST // _axes.size(axes)), axes)
