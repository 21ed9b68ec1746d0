"""Optimizer states and parameters that are sharded over the workers, as in ZeRO and FSDP."""

import concurrent.futures
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpy.lib.array_utils import normalize_axis_index

from fftgrad import _axes
from fftgrad._contracts import AxisName, Codec, Comm, Memory, PyTree, Stats
from fftgrad._values import check, check_count, check_kind, check_transformation
from fftgrad.codecs import Hadamard, UniformQuantizer, chain
from fftgrad.exchanges import _shards, _two_stage
from fftgrad.exchanges._bucketing import check_leaf
from fftgrad.exchanges._parts import Vectors, codec_of
from fftgrad.exchanges._shards import Reset, add_worker_axis, drop_worker_axis
from fftgrad.memories import NoMemory
from fftgrad.ops import _count, _finite, _rounding
from fftgrad.ops._random import as_key, check_key
from fftgrad.training import _pmean
from fftgrad.training._gradients import (
    check_local,
    check_replicated,
    checked_like,
    refuse_masked,
    weighted,
)
from fftgrad.training._state import ShardedState

EIGHT = UniformQuantizer(bits=8, bucket=256, norm="max")
FOUR = chain(Hadamard(block=256), UniformQuantizer(bits=4, bucket=256, norm="max"))
OWNER = "sharded"
REMEDY = "use UniformQuantizer(bits=8)."


def sharded(
    inner: optax.GradientTransformation,
    workers: int,
    *,
    gradients: Codec = FOUR,
    parameters: Codec = EIGHT,
    memory: Memory = NoMemory(),
    key: jax.Array | int = 0,
    allow_masked: bool = False,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    """Optimizer: each worker updates its shard of the parameters; all traffic is compressed.

    This is ZeRO-2: each of w workers stores 1/w of the inner optimizer's state. Worker i owns shard
    i of each leaf, and keeps a float32 copy φ of it (as φ - θ). Let θ be the parameters, equal on
    all workers, and C the codec of the differences:

        g_i ← mean of the workers' compressed gradients of shard i,   φ ← φ + inner(g_i),
        θ ← θ + C(φ - θ)   on all workers.

    The next difference includes the error of C, so errors do not accumulate. Chain nothing after
    this optimizer: φ would not follow.

    The inner optimizer gets flat shards of shape (size, 1, ...), with as many axes as the leaf. So
    it must be elementwise, like Adam, SGD, Lion, schedules and weight decay. `init` tries four
    updates of small arrays. It refuses an optimizer that reads a whole leaf or tree (clipping by a
    norm, Adafactor, Muon) or keeps the first parameters (schedule-free). Masks must depend on names
    or `ndim`; masks that depend on sizes are not detected. To clip, chain
    `fg.training.clip_by_local_norm(1.0)` before this optimizer: then the mean of the uncompressed
    gradients has a norm of at most 1 too. For different optimizers of different leaves, pass an
    `optax.partition` as `inner`.

    `update(..., weight=tokens)` weights a worker's gradient, as `compressed_pmean` does. `inner`
    gets `value=loss` as the weighted mean over the workers. Other extra arguments reach `inner`
    unchanged; they must be scalars that are equal on all workers.

    Args:
      inner: the optimizer of each shard, complete with its learning rate.
      workers: w, the number of workers.
      gradients: the codec of the gradients. The default rotates, and rounds to 4 bits a value.
      parameters: C, the codec of the differences. The default rounds to 8 bits a value.
      memory: the memory of unsent gradients. Use `ErrorFeedback()` for biased codecs.
      key: a seed or key, equal on all workers.
      allow_masked: True if leaves may be masked, as for `compressed_pmean`.
      axis_name: the axis, or axes, of the workers.

    Returns:
      A transformation whose state is a `ShardedState`. It needs `params`, equal on all workers.

    Wire: for n values, w buffers with the gradient of n/w values and one with n/w differences, each
      with a header of 4 bytes. With one codec for both: `fg.wire_bytes(fg.TwoStage(codec, workers),
      params, fg.Bucketing("leaf"))`. If you pass `value`, an all-reduce adds 4 bytes.

    Claims: the parameters have the same bits on all workers. If a gradient or a mean is not finite,
      parameters and inner state stay unchanged, and `state.skipped` counts the step. The state fits
      only this number of workers: `fg.checkpoint.reshard_state` refuses another.

    Raises:
      ValueError: while tracing, if `params` varies over the axis, a gradient is summed already, or
        a leaf is masked without `allow_masked`.

    Differs from Jia et al.: gradients are quantized once for all links; theirs are quantized once
      for the links within a machine, and again for those between machines.

    Example:
      >>> import optax
      >>> tx = fg.optimizers.sharded(optax.adam(1e-3), workers=4)
      >>> state = jax.eval_shape(tx.init, {"w": jnp.zeros((10, 8))})
      >>> state.inner.worker_rows.reset_rows[0].mu["w"].shape
      (1, 20, 1)

    References:
      Rajbhandari et al., 2020, arXiv:1910.02054; Jia et al., NeurIPS 2024, arXiv:2410.15526.
    """
    check_transformation(f"{OWNER}(inner)", inner)
    check_kind(f"{OWNER}(gradients)", gradients, Codec, REMEDY)
    check_kind(f"{OWNER}(parameters)", parameters, Codec, REMEDY)
    check_kind(f"{OWNER}(memory)", memory, Memory, "use ErrorFeedback().")
    check_key(f"{OWNER}(key)", key)
    check_count(f"{OWNER}(workers)", workers, "use the number of workers along the axis.")
    run: Any = optax.with_extra_args_support(inner).update

    def init(params: optax.Params) -> ShardedState:
        like = checked_like(params, OWNER)
        check_inner(inner, like)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            _shards.shard_likes(_some(like), workers),
        )
        shards = _whole(zeros, like, _as_leaf)
        return ShardedState(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            memory=add_worker_axis(memory.init(like)),
            inner=add_worker_axis(Reset(inner.init(shards))),
            ahead=add_worker_axis(Reset(zeros)),
        )

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: jax.Array | float | None = None,
        weight: jax.Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ShardedState]:
        if params is None:
            raise ValueError("sharded.update(params): must be given, got None; pass params.")
        if not allow_masked:
            refuse_masked(updates, OWNER)
        like = checked_like(updates, OWNER)
        check_local(updates, axis_name, OWNER)
        check_replicated(params, axis_name, OWNER)
        _axes.check_workers(OWNER, workers, axis_name)
        some = _some(like)
        shards = _shards.shard_likes(some, workers)
        there, back = (codec_of(codec, shards).shard(workers) for codec in (gradients, parameters))
        comm = Comm.of(axis_name, key, state.step)
        own = drop_worker_axis(state.memory)
        updates, params = _axes.whole((updates, params))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        grads = weighted(grads, weight, axis_name)
        x, added = memory.add(grads, own)

        rows = tuple(_shards.to_shards(_some(x), workers))
        before = jax.tree.map(lambda a: jnp.stack([a] * workers), there.init())
        got = _two_stage.to_owners(there, rows, before, comm.fold(0))
        mine = _mine(params, workers, axis_name)
        ahead = drop_worker_axis(state.ahead).reset_rows
        master = tuple(map(operator.add, mine, ahead))
        if value is not None:  # the mean, because `inner` needs an equal value on all workers
            own_loss = _axes.vary(jnp.asarray(value, jnp.float32), axis_name)
            extra["value"] = lax.pmean(weighted(own_loss, weight, axis_name), axis_name)
        inside = tuple(_whole(vectors, like, _as_leaf) for vectors in (got.vectors, master))
        moves, after = run(inside[0], drop_worker_axis(state.inner).reset_rows, inside[1], **extra)
        flat = [move.ravel() for move in _some(moves)]
        master = tuple(map(operator.add, master, flat))
        lacks = tuple(map(operator.sub, master, mine))
        # Check the received gradients too, because the inner optimizer may hide a NaN.
        came = got.stats._replace(finite=_finite.all_finite(got.vectors))
        out = _two_stage.to_all(back, lacks, back.init(), comm.fold(1), came)
        change = _rounded(_shards.from_shards(out.vectors, some), _some(updates))
        # Rounding errors of the change, and of the changed parameters, go into the next difference.
        moved = _rounded(map(operator.add, mine, _mine(change, workers, axis_name)), _some(params))
        lacking = tuple(map(operator.sub, master, moved))
        change: Any = _axes.whole(_whole(change, updates))
        finite = jnp.asarray(out.stats.finite) & _finite.all_finite(out.vectors)
        finite = _pmean.all_finite(Stats(finite), change)
        change = jax.tree.map(lambda m: jnp.where(finite, m, 0), change)

        error = _whole(_shards.from_shards(got.errors, some), x)
        mean = jax.tree.map(jnp.zeros_like, x)  # no worker has the whole mean
        remembered = memory.update(x, error, mean, added)
        old = (state.memory, state.inner, state.ahead)
        new = (
            add_worker_axis(remembered),
            add_worker_axis(Reset(after)),
            add_worker_axis(Reset(lacking)),
        )
        remembered, after, lacking = optax.tree.where(finite, new, old)
        skipped = jnp.where(finite, state.skipped, _count.next_step(state.skipped))
        step = _count.next_step(state.step)
        return change, ShardedState(step, skipped, remembered, after, lacking)

    return optax.GradientTransformationExtraArgs(init, _axes.without_explicit(update))


def _mine(tree: PyTree, workers: int, axis_name: AxisName) -> Vectors:
    """Return this worker's shard of each leaf, in float32."""
    index = jax.lax.axis_index(axis_name)
    wide = tuple(leaf.astype(jnp.float32) for leaf in _some(tree))
    return tuple(jnp.take(rows, index, axis=0) for rows in _shards.to_shards(wide, workers))


def _some(tree: PyTree) -> tuple[Any, ...]:
    return tuple(leaf for leaf in jax.tree.leaves(tree) if leaf.size)


def _rounded(wide: Any, likes: Any) -> Vectors:
    """Round values to the dtypes of `likes`, and return them in float32.

    A cast to the dtype and back might not round, because XLA may drop both casts.
    """
    pairs = zip(wide, likes, strict=True)
    return tuple(_rounding.rounded(value, like.dtype) for value, like in pairs)


def _whole(some: Any, like: PyTree, made: Callable[..., Any] | None = None) -> PyTree:
    """Rebuild the tree `like` from its non-empty leaves; cast them to its dtypes by default."""
    left = iter(some)

    def leaf(like: Any) -> jax.Array:
        if not like.size:
            # New zeros, because JAX may type the empty leaf of the tree as varying.
            return jnp.zeros(like.shape, like.dtype)
        return made(next(left), like) if made else next(left).astype(like.dtype)

    return jax.tree.map(leaf, like)


def _as_leaf(vector: Any, like: Any) -> Any:
    """Reshape a flat shard to as many axes as its leaf has."""
    return vector.reshape((-1, *[1] * (like.ndim - 1)) if like.ndim else ())


SCALES = 1.0, 300.0, 30.0, 3.0
"""Factors of the gradients in four trial updates, so that a clip acts in some of them."""


def check_inner(inner: optax.GradientTransformation, like: PyTree) -> None:
    """Refuse an optimizer that updates a shard otherwise than it updates the whole leaf."""
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> np.ndarray:
        shape = (4, *[2] * (leaf.ndim - 1)) if leaf.ndim and leaf.size else leaf.shape
        return random.standard_normal(shape, np.float32)

    def half(leaf: Any) -> Any:
        if not leaf.ndim or not leaf.size:
            return leaf
        return _as_leaf(np.split(np.ravel(leaf), 2)[1], leaf)

    def moves(trees: list[PyTree], of_shards: bool) -> list[Any]:
        params, *grads = trees
        # `sharded.init` also starts from zeros, because no worker knows its shard there.
        state = _started(inner, optax.tree.zeros_like(params) if of_shards else params)
        found: list[Any] = []
        for grad in grads:
            move, state, params = _stepped(inner, grad, state, params)
            found += jax.tree.leaves(move)
        return found

    def alike() -> bool:
        whole = [jax.tree.map(lambda leaf, s=s: s * draw(leaf), like) for s in (1.0, *SCALES)]
        found = zip(moves(whole, False), moves(jax.tree.map(half, whole), True), strict=True)
        size = lambda move: np.max(np.abs(move), initial=0.0)  # noqa: E731
        return all(size(half(one) - own) <= 1e-3 * size(one) for one, own in found)

    rule, got = (
        "update each value by itself",
        "one that reads whole leaves, as a clip by a norm does",
    )
    remedy = "use optax.adamw, and clip before it by fg.training.clip_by_local_norm."
    # Run in a thread: within the trace of `init`, arrays would have no values.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        check(pool.submit(alike).result(), "sharded(inner)", rule, got, remedy)


@functools.partial(jax.jit, static_argnums=0)  # because eager JAX compiles every operation
def _started(inner: optax.GradientTransformation, params: PyTree) -> PyTree:
    return inner.init(params)


@functools.partial(jax.jit, static_argnums=0)
def _stepped(
    inner: optax.GradientTransformation, grad: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    step = optax.with_extra_args_support(inner).update
    move, state = step(grad, state, params, value=jnp.ones(()))
    return move, state, optax.apply_updates(params, move)


def gather_parameters(
    shard: jax.Array,
    axis_name: AxisName,
    gradients: Codec = FOUR,
    *,
    parameters: Codec | None = None,
    dimension: int = 0,
    step: jax.Array | int,
    key: jax.Array | int = 0,
) -> jax.Array:
    """Function: gather sharded parameters, and compress their gradient on the way back.

    Call it in a loss under `jax.shard_map` with parameters sharded over the workers (FSDP, ZeRO-3).
    The value is `jax.lax.all_gather(shard, axis_name, axis=dimension, tiled=True)`. The gradient
    is the compressed `jax.lax.psum_scatter` of the cotangents: the *sum* over the workers, as for
    JAX's all-gather. For the mean, divide the loss by the number of workers. Then update the shards
    by any elementwise optimizer.

    A differentiated function keeps no state, so there is no error feedback. Use unbiased codecs,
    such as the default, and another `step` in each step.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      gradients: the codec of one shard of the gradients, of which `TopK(k)` keeps k / w values for
        w workers. The default rotates, and rounds to 4 bits.
      parameters: the codec of a shard of the parameters; with None, they are not compressed.
      dimension: the axis along which the shards are concatenated.
      step: number of the step, equal on all workers, because equal random numbers in every step
        would add up to a bias.
      key: a seed or key, equal on all workers. Use a different key for each array of a model.

    Returns:
      The whole array, of the dtype of `shard`.

    Wire: forward, bytes of the shard, or with `parameters` one buffer of `fg.wire_bytes(parameters,
      shard)` bytes; backward, w buffers, each a header of 4 bytes and the payload of a shard.

    Claims: the gradient is unbiased if `gradients` is. If a shard of a cotangent is not finite, the
      gradient of its owner is NaN. If a compressed shard is not finite, the value is NaN.

    Example:
      >>> def loss(shard, x):
      ...     w = fg.optimizers.gather_parameters(shard, "data", fg.codecs.Identity(), step=0)
      ...     return jnp.sum(w * x) / 2
      >>> shards, x = jnp.array([[1.0], [2.0]]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> jax.vmap(jax.grad(loss), axis_name="data")(shards, x)
      Array([[2.],
             [3.]], dtype=float32)

    References:
      Wang et al., 2023, arXiv:2306.10209; Jia et al., NeurIPS 2024, arXiv:2410.15526. The latter
      gathers differences, like `fg.optimizers.sharded`.
    """
    check_kind("gather_parameters(gradients)", gradients, Codec, REMEDY)
    if parameters is not None:
        check_kind("gather_parameters(parameters)", parameters, Codec, REMEDY)
    _axes.size(axis_name, "gather_parameters")
    check_leaf("gather_parameters", "shard", shard)
    axis = normalize_axis_index(dimension, shard.ndim)

    @jax.custom_vjp
    def gather(shard: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
        if parameters is None:
            return lax.all_gather(shard, axis_name, axis=axis, tiled=True)
        whole = _gathered(parameters, shard, axis, Comm.of(axis_name, key, step))
        return _axes.vary(whole, axis_name)  # because cotangents differ between the workers

    def forward(shard: jax.Array, step: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        return gather(shard, step, key), (step, key)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        step, key = kept
        return _scattered(gradients, cotangent, axis, Comm.of(axis_name, key, step)), None, None

    gather.defvjp(forward, backward)
    return gather(shard, jnp.asarray(step), as_key("gather_parameters(key)", key))


def _gathered(codec: Codec, shard: jax.Array, axis: int, comm: Comm) -> jax.Array:
    """Return the compressed shards of all workers, concatenated along an axis."""
    if not shard.size:
        return jnp.concatenate([shard] * comm.workers, axis)
    front = jnp.moveaxis(shard.astype(jnp.float32), axis, 0)
    parts = codec_of(codec, front)
    (rows,) = _two_stage.to_all(parts, (front.ravel(),), parts.init(), comm).vectors
    whole = rows.reshape(comm.workers * front.shape[0], *front.shape[1:])
    return jnp.moveaxis(whole, 0, axis).astype(shard.dtype)


def _scattered(codec: Codec, x: jax.Array, axis: int, comm: Comm) -> jax.Array:
    """Return this worker's shard of the sum of `x` over the workers, all compressed."""
    workers = comm.workers
    if not x.size:
        return lax.slice_in_dim(x, 0, x.shape[axis] // workers, axis=axis)
    front = jnp.moveaxis(x.astype(jnp.float32), axis, 0)
    rows = front.reshape(workers, -1)
    parts = codec_of(codec, jax.eval_shape(lambda rows: rows[0], rows)).shard(workers)
    before = jax.tree.map(lambda a: jnp.stack([a] * workers), parts.init())
    (vector,) = _two_stage.to_owners(parts, (rows,), before, comm).vectors
    shard = workers * vector.reshape(front.shape[0] // workers, *front.shape[1:])
    return jnp.moveaxis(shard, 0, axis).astype(x.dtype)
