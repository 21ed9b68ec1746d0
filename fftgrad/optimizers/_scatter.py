"""Collectives for arrays that are sharded over the workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpy.lib.array_utils import normalize_axis_index

from fftgrad import _axes
from fftgrad._contracts import AxisName, Codec, Comm
from fftgrad._values import check, check_kind
from fftgrad.codecs import Hadamard, UniformQuantizer, chain
from fftgrad.exchanges import _two_stage
from fftgrad.exchanges._bucketing import check_leaf
from fftgrad.exchanges._parts import codec_of
from fftgrad.ops._random import as_key, check_key

EIGHT = UniformQuantizer(bits=8, bucket=256, norm="max")
FOUR = chain(Hadamard(block=256), UniformQuantizer(bits=4, bucket=256, norm="max"))

REMEDY = "pass UniformQuantizer(bits=8)."


class Scattered(NamedTuple):
    """Result of `compressed_psum_scatter`.

    Attributes:
      shard: this worker's shard of the sum over the workers.
      sent: this worker's `x` after compression and decompression, float32, of the shape of `x`.
    """

    shard: jax.Array
    sent: jax.Array


def compressed_psum_scatter(
    x: jax.Array,
    axis_name: AxisName,
    codec: Codec = FOUR,
    *,
    scatter_dimension: int = 0,
    step: jax.Array | int = 0,
    key: jax.Array | int = 0,
) -> Scattered:
    """Function: `jax.lax.psum_scatter(x, axis_name, tiled=True)`, compressed.

    FSDP and ZeRO reduce gradients this way. Each worker cuts its `x` along an axis into w shards.
    Worker i receives and adds the i-th shards of all. For error feedback, keep the residual:

        out = fg.optimizers.compressed_psum_scatter(gradient + residual, "data", codec)
        residual = gradient + residual - out.sent

    Args:
      x: float array of at most 32 bits; its length along `scatter_dimension` is a multiple of the
        number of workers w.
      axis_name: the axis, or axes, of the workers.
      codec: the codec of one shard, a vector of x.size / w values. The k of `TopK` is the number of
        values kept of the whole `x`. The default rotates, and rounds to 4 bits.
      scatter_dimension: the axis of `x` that is cut.
      step: number of the step, equal on all workers. A codec with random rounding needs it, because
        equal random numbers in every step would add up to a bias.
      key: a seed or key, equal on all workers.

    Wire: w buffers, each a header of 4 bytes and the payload of x.size / w values.

    Claims: unbiased if the codec is. If a worker sends a shard that is not finite, the sum is NaN
      on the owner of this shard only.

    Example:
      >>> x = jnp.array([[1.0, 2.0, -3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
      >>> scatter = fg.optimizers.compressed_psum_scatter
      >>> mean = lambda x: scatter(x, "data", fg.codecs.Identity()).shard
      >>> jax.vmap(mean, axis_name="data")(x)
      Array([[2., 4.],
             [0., 8.]], dtype=float32)

    References:
      Wang et al., 2023, arXiv:2306.10209; Jia et al., NeurIPS 2024, arXiv:2410.15526.
    """
    owner = "compressed_psum_scatter"
    comm = _start(owner, x, codec, axis_name, step, key)
    workers = comm.workers
    axis = normalize_axis_index(scatter_dimension, x.ndim)
    if not x.size:
        shard = lax.slice_in_dim(x, 0, x.shape[axis] // workers, axis=axis)
        return Scattered(shard, x.astype(jnp.float32))
    front = jnp.moveaxis(x.astype(jnp.float32), axis, 0)
    rows = front.reshape(workers, -1)
    parts = codec_of(codec, jax.eval_shape(lambda rows: rows[0], rows)).shard(workers)
    before = jax.tree.map(lambda a: jnp.stack([a] * workers), parts.init())
    got = _two_stage.to_owners(parts, (rows,), before, comm)
    shape = (front.shape[0] // workers, *front.shape[1:])
    shard = workers * got.vectors[0].reshape(shape)
    return Scattered(
        jnp.moveaxis(shard, 0, axis).astype(x.dtype),
        jnp.moveaxis(got.sent[0].reshape(front.shape), 0, axis),
    )


def compressed_all_gather(
    shard: jax.Array,
    axis_name: AxisName,
    codec: Codec = EIGHT,
    *,
    reference: jax.Array | None = None,
    gather_dimension: int = 0,
    step: jax.Array | int = 0,
    key: jax.Array | int = 0,
) -> jax.Array:
    """Function: `jax.lax.all_gather(shard, axis_name, tiled=True)`, compressed.

    Pass the result of the last gather as `reference`. Each worker then sends the *difference*
    between its shard and the reference. The next difference includes the error of this gather, so
    errors do not accumulate. Parameters change little in a step, so a few bits are enough.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      codec: the codec of one shard, a vector, of which `TopK(k)` keeps k values. The default has 8
        bits a value.
      reference: the last result, the same bits on all workers. With None, workers send the shards.
      gather_dimension: the axis along which the shards are concatenated.
      step: as for `compressed_psum_scatter`.
      key: a seed or key, equal on all workers.

    Returns:
      The whole array, the same bits on all workers, of the dtype of `reference`, or of `shard`.

    Wire: one buffer of `fg.wire_bytes(codec, shard)` bytes, which a ring sends w - 1 times.

    Claims: the result is NaN on all workers if a shard is not finite.

    Example:
      >>> shards, before = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1.0, 2.0, 2.5, 4.5])
      >>> from fftgrad.optimizers import compressed_all_gather
      >>> gather = lambda s: compressed_all_gather(s, "data", fg.Sign(), reference=before)
      >>> jax.vmap(gather, axis_name="data")(shards)[0]
      Array([1., 2., 3., 4.], dtype=float32)

    References:
      Jia et al., NeurIPS 2024, arXiv:2410.15526.
    """
    owner = "compressed_all_gather"
    comm = _start(owner, shard, codec, axis_name, step, key)
    workers = comm.workers
    axis = normalize_axis_index(gather_dimension, shard.ndim)
    expected = tuple(n * (workers if i == axis else 1) for i, n in enumerate(shard.shape))
    like = shard if reference is None else reference
    fine, remedy = reference is None or like.shape == expected, "pass the last result."
    check(fine, f"{owner}(reference)", f"be of shape {expected}", like.shape, remedy)
    if not shard.size:
        return jnp.zeros(expected, like.dtype)
    front = jnp.moveaxis(shard.astype(jnp.float32), axis, 0)
    parts = codec_of(codec, front)
    sends, before = front.ravel(), None
    if reference is not None:
        before = jnp.moveaxis(reference.astype(jnp.float32), axis, 0).reshape(workers, -1)
        sends = sends - jnp.take(before, comm.index, axis=0)
    (rows,) = _two_stage.to_all(parts, (sends,), parts.init(), comm).vectors
    rows = rows if before is None else before + rows
    whole = rows.reshape(workers * front.shape[0], *front.shape[1:])
    return jnp.moveaxis(whole, 0, axis).astype(like.dtype)


def _start(
    owner: str,
    x: jax.Array,
    codec: Codec,
    axis_name: AxisName,
    step: jax.Array | int,
    key: jax.Array | int,
) -> Comm:
    check_kind(f"{owner}(codec)", codec, Codec, REMEDY)
    check_key(f"{owner}(key)", key)
    _axes.size(axis_name, owner)
    check_leaf(owner, "x", x)
    return Comm.of(axis_name, key, step)


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
    The value is `jax.lax.all_gather(shard, axis_name, axis=dimension, tiled=True)`. The gradient is
    the `compressed_psum_scatter` of the cotangents: the *sum* over the workers, as for JAX's
    all-gather. For the mean, divide the loss by the number of workers. Then update the shards by
    any elementwise optimizer.

    A differentiated function keeps no state, so there is no error feedback. Use unbiased codecs,
    such as the default, and another `step` in each step.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      gradients: the codec of the gradients' shards.
      parameters: the codec of the parameters; with None, they are not compressed.
      dimension: the axis along which the shards are concatenated.
      step: number of the step, equal on all workers.
      key: a seed or key, equal on all workers. Use a different key for each array of a model.

    Returns:
      The whole array, of the dtype of `shard`.

    Wire: forward, bytes of the shard, or of `compressed_all_gather` with `parameters`; backward,
      bytes of `compressed_psum_scatter`.

    Claims: the gradient is unbiased if `gradients` is.

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
    _axes.size(axis_name, "gather_parameters")
    check_leaf("gather_parameters", "shard", shard)
    axis = normalize_axis_index(dimension, shard.ndim)

    @jax.custom_vjp
    def gather(shard: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
        if parameters is None:
            return lax.all_gather(shard, axis_name, axis=axis, tiled=True)
        whole = compressed_all_gather(
            shard, axis_name, parameters, gather_dimension=axis, step=step, key=key
        )
        return _axes.vary(whole, axis_name)  # because cotangents differ between the workers

    def forward(shard: jax.Array, step: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        return gather(shard, step, key), (step, key)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        step, key = kept
        out = compressed_psum_scatter(
            cotangent, axis_name, gradients, scatter_dimension=axis, step=step, key=key
        )
        return out.shard, None, None

    gather.defvjp(forward, backward)
    return gather(shard, jnp.asarray(step), as_key("gather_parameters(key)", key))
