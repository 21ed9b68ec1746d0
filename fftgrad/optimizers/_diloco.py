"""Optimizers with local steps, and an outer optimizer that applies the mean change."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Exchange, Memory, PyTree
from fftgrad._values import check, check_count, check_transformation, check_within
from fftgrad.codecs import BinMeans, LogQuantizer, Tiles, TopK, chain
from fftgrad.exchanges import AllGather, Recipe
from fftgrad.exchanges._shards import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.memories import ErrorFeedback
from fftgrad.methods._recipes import LargestOfTiles
from fftgrad.ops import _count, _finite
from fftgrad.optimizers import _fragments
from fftgrad.training._pmean import CompressedPmeanState, compressed_pmean

DECAYED = ErrorFeedback(decay=0.95)
SPARSE = AllGather(chain(TopK(fraction=0.03), LogQuantizer(bits=4)))


class DilocoState(NamedTuple):
    """State of `diloco`."""

    step: jax.Array  # number of inner steps, int32, equal on all workers
    anchor: optax.Params  # parameters after the last outer step, the same bits on all workers
    inner: PerWorker  # state of the inner optimizer
    outer: tuple[optax.OptState, ...]  # outer state of each fragment, equal on all workers
    pmean: tuple[CompressedPmeanState, ...]  # exchange state of each fragment
    skipped: PerWorker  # number of inner steps of this worker that were not finite, int32


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    sync_every: int,
    exchange: Exchange | Recipe = SPARSE,
    memory: Memory | None = None,
    *,
    fragments: int = 1,
    overlap_steps: int = 0,
    mixing: float = 0.0,
    allow_masked: bool = False,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: local steps on each worker, then a compressed mean of the workers' changes.

    Let θ be the parameters of a worker, and θ̄ the anchor, which is equal on all workers. Each
    worker takes H local steps

        θ ← θ + inner(∇f(θ)).

    Then all workers take an outer step. C averages the changes, compressed and with memory:

        θ̄ ← θ̄ + outer(C(θ̄ - θ)),   θ ← θ̄.

    It is a whole optimizer: chain nothing after it, and pass `params` to `update`. Start with
    `optax.adamw(3e-4)` as inner and `optax.sgd(1.0)` as outer. The paper's outer optimizer,
    `optax.sgd(0.7, momentum=0.9, nesterov=True)`, is for uncompressed changes. Error feedback acts
    like momentum: with a sparse codec, error feedback and this outer optimizer, runs diverged
    (docs/results/islands.md).

    *Streaming.* With P fragments, the workers exchange one fragment every H/P steps: a P-th of the
    rows of every leaf. The whole model never travels at once. With an overlap of τ steps, the
    exchange runs during the next inner step, and its result updates `anchor` in that step. The
    worker mixes the anchor into its parameters τ inner steps after they were sent, and keeps a
    share α of its own progress: θ ← α θ + (1 - α) θ̄. If also `fragments=sync_every`, every step
    exchanges the same number of bytes, outside of `lax.cond`. XLA can then overlap the exchange
    with the backward pass.

        outer = optax.sgd(1.0)
        fg.optimizers.diloco(adamw, outer, 30, fragments=30, overlap_steps=1, mixing=0.5)

    For different intervals for different layers, put several `diloco` into one `optax.partition`,
    each with its own `sync_every` and with `allow_masked=True`.

    Between two outer steps the parameters differ between the workers. Under `jax.shard_map`, give
    the parameters a leading axis of workers. Evaluate and save `state.anchor`. With
    `check_vma=False`, JAX does not notice if parameters are wrongly declared replicated; a
    checkpoint would then hold those of one worker only. Without fragments, overlap and mixing, the
    parameters after an outer step equal `state.anchor` up to one rounding.

    In an outer step, `update(..., weight=tokens)` weights the change of this worker. A worker with
    weight 0 sends only its residual. `inner` gets `value=loss` and other extra arguments unchanged,
    `outer` gets none.

    Args:
      inner: the optimizer of each worker, complete with its learning rate. It must update the
        parameters themselves. Schedule-free updates a copy, which would never be averaged.
      outer: the optimizer of the anchor; its gradient is the mean change.
      sync_every: H, the number of inner steps between two outer steps of a fragment.
      exchange: the exchange of the changes, or a method, such as `fg.methods.eden()`.
      memory: the memory of unsent changes; by default the method's own, or `ErrorFeedback(0.95)`.
      fragments: P, a divisor of H.
      overlap_steps: τ < H, the number of inner steps from sending parameters to changing them.
      mixing: α, the share of its own parameters that a worker keeps in an outer step, in [0, 1).
      allow_masked: True if leaves may be masked, as for `compressed_pmean`.
      axis_name: the axis, or axes, of the workers.

    Wire: the bytes of `exchange` for one fragment in every (H/P)-th step, within a `lax.cond`
      unless P = H. Other steps send nothing. A fragment has ceil(rows / P) rows of each leaf, along
      the first axis of at least P rows, or else along the longest axis.

    Claims: `state.anchor` has the same bits on all workers. If a worker's gradient or inner update
      is not finite, that worker skips the inner step: its parameters and inner state stay
      unchanged, and `state.skipped` counts the step. If a value of an outer step is not finite,
      `anchor`, the outer state and the memory stay unchanged, and all workers return to `anchor`.

    Raises:
      ValueError: while tracing, if `params` is missing, or if JAX types it as replicated.

    Differs from the papers: the notebook of DiLoCo's authors resets the inner optimizer after each
      outer step; here it keeps its moments. The fragments of Streaming DiLoCo are layers; here they
      are rows of every layer, so that all fragments have equal shapes and share one program.

    Example:
      >>> import optax
      >>> tx = fg.optimizers.diloco(optax.adamw(3e-4), optax.sgd(1.0), sync_every=50)
      >>> jax.eval_shape(tx.init, jnp.zeros(9)).anchor.shape
      (9,)

    References:
      Douillard et al., 2023, arXiv:2311.08105; 2025, arXiv:2501.18512. Sarfi et al., 2025,
      arXiv:2508.15706.
    """
    check_transformation("diloco(inner)", inner)
    check_transformation("diloco(outer)", outer)
    check_count("diloco(sync_every)", sync_every, "use 50.")
    check_count("diloco(fragments)", fragments, f"use {sync_every}.")
    fine, rule = sync_every % fragments == 0, f"be a divisor of sync_every={sync_every}"
    check(fine, "diloco(fragments)", rule, fragments, f"use {sync_every}.")
    check_count("diloco(overlap_steps)", overlap_steps, "use 1.", 0, sync_every - 1)
    check_within("diloco(mixing)", mixing, "[0, 1)", "use 0.5.")
    period = sync_every // fragments
    if memory is None and not isinstance(exchange, Recipe):
        memory = DECAYED
    compressed: Any = compressed_pmean(
        exchange, memory, axis_name=axis_name, allow_masked=allow_masked
    )
    run_inner: Any = optax.with_extra_args_support(inner).update

    def init(params: optax.Params) -> DilocoState:
        anchor = jax.tree.map(jnp.copy, params)  # because a caller may donate params and state
        part = _fragments.take(anchor, jnp.int32(0), fragments)
        return DilocoState(
            step=jnp.zeros((), jnp.int32),
            anchor=anchor,
            inner=add_worker_axis(inner.init(params)),
            outer=tuple(outer.init(part) for _ in range(fragments)),
            pmean=tuple(compressed.init(part) for _ in range(fragments)),
            skipped=add_worker_axis(jnp.zeros((), jnp.int32)),
        )

    def meeting(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return True if an exchange is due after `steps` steps, and the number of its fragment."""
        since = steps - period
        return (since >= 0) & (since % period == 0), since // period % fragments

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, DilocoState]:
        if params is None:
            raise ValueError("diloco.update(params): must be given, got None; pass params.")
        check_own("diloco", params, axis_name)
        before = drop_worker_axis(state.inner)
        moves, after = run_inner(updates, before, params, **extra)
        # An optimizer may hide a NaN of the gradient, and a parameter may overflow.
        seen = updates, optax.apply_updates(params, moves)
        fine = _axes.everywhere(_finite.all_finite(seen), but=_axes.names(axis_name))
        # XLA would otherwise recompute the flag for every leaf, and compile for minutes.
        fine = lax.optimization_barrier(_axes.vary(fine, axis_name))
        own = optax.tree.where(fine, after, before)
        skipped = drop_worker_axis(state.skipped)
        skipped = jnp.where(fine, skipped, _count.next_step(skipped))

        def wide(move: jax.Array, own: jax.Array) -> jax.Array:
            # At least as wide as the parameters, because an outer step changes them much.
            return jnp.where(fine, move, 0).astype(jnp.promote_types(move.dtype, own.dtype))

        updates = jax.tree.map(wide, moves, params)
        local = optax.apply_updates(params, updates)
        # With overlap, send parameters from before this step: XLA can run both at the same time.
        sends = params if overlap_steps else local
        step = _count.next_step(state.step, sync_every)
        due, number = meeting(state.step if overlap_steps else step)

        def meet(now: jax.Array | bool) -> tuple[Any, Any, Any]:
            anchor = _fragments.take(state.anchor, number, fragments)
            outside = _fragments.select(state.outer, number)
            before = _fragments.select(state.pmean, number)
            change = jax.tree.map(jnp.subtract, anchor, _fragments.take(sends, number, fragments))
            mean, pmean = compressed.update(change, before, weight=weight, **extra)
            moved, after = outer.update(mean, outside, anchor)
            moved = optax.apply_updates(anchor, moved)
            good = now & (pmean.skipped == before.skipped)
            return (
                _fragments.put(state.anchor, moved, number, fragments, good),
                _fragments.replace(state.outer, after, number, good),
                _fragments.replace(state.pmean, pmean, number, now),
            )

        def join(now: jax.Array | bool, anchor: Any, number: jax.Array) -> Any:
            def back(own: jax.Array, common: jax.Array, before: jax.Array) -> jax.Array:
                kept = mixing * own + (1 - mixing) * common if mixing else common
                return kept.astype(own.dtype) - before

            trees = [_fragments.take(tree, number, fragments) for tree in (local, anchor, params)]
            moved = jax.tree.map(back, *trees)
            return _fragments.put(updates, moved, number, fragments, now)

        def meet_and_join(now: jax.Array | bool) -> tuple[Any, Any]:
            met = meet(now)
            return met, (updates if overlap_steps else join(now, met[0], number))

        met = state.anchor, state.outer, state.pmean
        met, moves = _if(due, period == 1, meet_and_join, (met, updates))
        if overlap_steps:
            due, number = meeting(step - overlap_steps)
            moves = _if(due, period == 1, lambda now: join(now, met[0], number), updates)
        anchor, after, pmean = met
        own, skipped = map(add_worker_axis, (own, skipped))
        return moves, DilocoState(step, anchor, own, after, pmean, skipped)

    return optax.GradientTransformationExtraArgs(init, update)


def _if(
    due: jax.Array, always: bool, then: Callable[[jax.Array | bool], Any], otherwise: Any
) -> Any:
    """Call `then` if `due`, else return `otherwise`; without a branch if `always`.

    XLA cannot overlap operations inside a branch with operations outside.
    """
    if always:
        return then(due)
    return lax.cond(due, lambda: then(True), lambda: otherwise)


def check_own(owner: str, params: PyTree, axis_name: AxisName) -> None:
    """Refuse parameters that JAX types as replicated over the workers."""
    for path, leaf in jax.tree.leaves_with_path(params):
        own = not isinstance(leaf, jax.Array) or _axes.varies(leaf, axis_name)
        argument = f"{owner}.update(params{jax.tree_util.keystr(path)})"
        rule, got = "be this worker's own", f"one that does not vary over {axis_name!r}"
        check(own, argument, rule, got, "give it a leading axis of workers, and shard this axis.")


def sparse_loco(
    inner: optax.GradientTransformation,
    *,
    sync_every: int = 30,
    outer_rate: float = 0.4,
    k: int = 64,
    block: int = 64,
    bits: int = 2,
    decay: float = 0.95,
    clip_to_median: bool = True,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: SparseLoCo: local steps, then the largest values of each tile in 2 bits.

    Let θ be the parameters of a worker, θ̄ the anchor, and e_i the residual of worker i. After H
    local steps of `inner`, the outer step is

        e_i ← decay · e_i + (θ̄ - θ),   q_i = 2 bits of the k largest of each tile of e_i,
        e_i ← e_i - q_i,
        θ̄ ← θ̄ - outer_rate · mean of q_i · min(1, median_j ||q_j|| / ||q_i||),   θ ← θ̄,

    with a norm for each leaf. It is `diloco` with `optax.sgd(outer_rate)`, `ErrorFeedback(0.95)`,
    and `AllGather(rule, clip_to_median=True)`. The codec of a leaf is
    `chain(Tiles(64, shape), ChunkTopK(4096, 64), BinMeans(2))`. The claims of `diloco` hold. For
    fragments or overlap, pass these parts to `diloco`.

    Args:
      inner: the optimizer of each worker with its learning rate, such as `optax.adamw(3e-4)`.
      sync_every: H, the number of inner steps between two outer steps.
      outer_rate: learning rate of the outer optimizer, which applies the mean change.
      k: number of values sent per tile.
      block: side of a tile. A leaf with one axis has tiles of `block` values; if block <= k, all of
        its values are sent.
      bits: bits per value sent.
      decay: decay of the residual.
      clip_to_median: as for `AllGather`.
      axis_name: the axis, or axes, of the workers.

    Wire: in an outer step, k (bits + 8) bits per tile of 4096 values, and 16 bytes per leaf. At 10
      bits per value sent, these are 204.8x fewer bytes than float32; the authors' code sends 14
      bits, 146x fewer. Leaves with one axis send 2 bits for each value.

    Differs from the paper: positions travel in Elias-Fano code. Axes are padded to whole tiles; the
      authors' code uses tiles whose side divides the axis. For an even number of workers, the
      median is the midpoint of the two middle norms.

    Example:
      >>> import optax
      >>> tx = fg.optimizers.sparse_loco(optax.adamw(3e-4), sync_every=30)
      >>> jax.eval_shape(tx.init, jnp.zeros(9)).anchor.shape
      (9,)

    References:
      Sarfi et al., 2025, arXiv:2508.15706; as run in 2026, arXiv:2603.08163.
    """
    return diloco(
        inner,
        optax.sgd(outer_rate),
        sync_every,
        AllGather(LargestOfTiles(Tiles, k, block, BinMeans(bits)), clip_to_median),
        ErrorFeedback(decay),
        axis_name=axis_name,
    )
