"""Collectives for what is sharded over the axis of the workers themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Codec, Comm
from fftgrad._values import check_kind
from fftgrad.codecs._chain import chain
from fftgrad.codecs._quantizers import UniformQuantizer
from fftgrad.codecs._transforms import Hadamard
from fftgrad.exchanges import _two_stage
from fftgrad.exchanges._parts import Likes, Parts
from fftgrad.ops._random import as_key, check_key

EIGHT = UniformQuantizer(bits=8, bucket=256, norm="max")
FOUR = chain(Hadamard(block=256), UniformQuantizer(bits=4, bucket=256, norm="max"))

REMEDY = "pass UniformQuantizer(bits=8)."


class Scattered(NamedTuple):
    """What `compressed_psum_scatter` returns.

    Attributes:
      shard: this worker's shard of the sum over the workers.
      sent: what the owners of the shards got of this worker's `x`, of its shape, in float32.
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

    What FSDP and ZeRO do with gradients: `x` is cut along an axis into a shard for each worker, who
    sums what it gets of its own. With error feedback the caller keeps what was not sent:

        out = fg.optimizers.compressed_psum_scatter(gradient + residual, "data", codec)
        residual = gradient + residual - out.sent

    Args:
      x: float array of at most 32 bits; its length along `scatter_dimension` is a multiple of the
        number of workers w.
      axis_name: the axis, or axes, of the workers.
      codec: of one shard, a vector of x.size / w values, though TopK's k is that of the whole `x`.
        The default is 4 bits after a rotation.
      scatter_dimension: the axis of `x` that is cut.
      step: number of the step, equal on all workers. A codec that draws needs it: equal draws in
        every step add up to a bias.
      key: a seed or key, equal on all workers.

    Wire: w buffers, each of 4 bytes and the payload of x.size / w values.

    Claims: unbiased if the codec is. Where a worker's part of a shard is not finite, or its buffer
      is of another codec or step, that shard is all NaN, on its owner only.

    Raises:
      ValueError: while tracing, if the axis of `x` is no multiple of the number of workers.
      TypeError: while tracing, if `x` is no float array of at most 32 bits, or `codec` no codec.

    Example:
      >>> x = jnp.array([[1.0, 2.0, -3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
      >>> scatter = lambda x: fg.optimizers.compressed_psum_scatter(x, "data", fg.Identity()).shard
      >>> jax.vmap(scatter, axis_name="data")(x)
      Array([[2., 4.],
             [0., 8.]], dtype=float32)

    References:
      Wang et al., 2023, arXiv:2306.10209; Jia et al., NeurIPS 2024, arXiv:2410.15526.
    """
    owner = "compressed_psum_scatter"
    comm = _start(owner, x, codec, axis_name, step, key)
    workers = comm.workers
    parts = Parts((codec,)).shard(workers)
    axis = axis_of(owner, "scatter_dimension", scatter_dimension, x)
    if x.shape[axis] % workers:
        raise ValueError(
            f"{owner}(x): must have a multiple of {workers}, the number of workers, along axis "
            f"{axis}, got {x.shape}; pad it with zeros, or cut along another axis."
        )
    if not x.size:
        shard = lax.slice_in_dim(x, 0, x.shape[axis] // workers, axis=axis)
        return Scattered(shard, x.astype(jnp.float32))
    front = jnp.moveaxis(x.astype(jnp.float32), axis, 0)
    rows, likes = front.reshape(workers, -1), _likes(x.size // workers)
    before = jax.tree.map(lambda a: jnp.stack([a] * workers), parts.init(likes))
    got = _two_stage.to_owners(parts, (rows,), before, likes, comm)
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

    With a `reference`, the array that all workers had before, each worker sends the *difference* of
    its shard from it. What one gather loses is part of the next difference, so errors do not add
    up, and as parameters change little in a step, a few bits are enough.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      codec: of one shard, a vector; TopK's k is that of the shard. The default has 8 bits a value.
      reference: what the last gather returned, the same bits on all workers; None sends values.
      gather_dimension: the axis along which the shards follow each other.
      step: as for `compressed_psum_scatter`.
      key: a seed or key, equal on all workers.

    Returns:
      The whole array, the same bits on all workers, of the dtype of `reference`, or of `shard`.

    Wire: one buffer of `fg.wire_bytes(codec, shard)` bytes, which a ring sends w - 1 times.

    Claims: if a shard is not finite, or a buffer is of another codec or step, the result is all
      NaN, on all workers.

    Raises:
      ValueError: while tracing, if `reference` is not of the shape of the result.
      TypeError: while tracing, if `shard` is no float array of at most 32 bits, or `codec` none.

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
    parts = Parts((codec,))
    axis = axis_of(owner, "gather_dimension", gather_dimension, shard)
    expected = tuple(n * (workers if i == axis else 1) for i, n in enumerate(shard.shape))
    if reference is not None and reference.shape != expected:
        raise ValueError(
            f"{owner}(reference): must be of shape {expected}, that of {workers} shards, got "
            f"{reference.shape}; pass what the last gather returned."
        )
    dtype = shard.dtype if reference is None else reference.dtype
    if not shard.size:
        return jnp.zeros(expected, dtype)
    front, likes = jnp.moveaxis(shard.astype(jnp.float32), axis, 0), _likes(shard.size)
    sends, before = front.ravel(), None
    if reference is not None:
        before = jnp.moveaxis(reference.astype(jnp.float32), axis, 0).reshape(workers, -1)
        sends = sends - jnp.take(before, comm.index, axis=0)
    (rows,) = _two_stage.to_all(parts, (sends,), parts.init(likes), likes, comm).vectors
    rows = rows if before is None else before + rows
    whole = rows.reshape(workers * front.shape[0], *front.shape[1:])
    return jnp.moveaxis(whole, 0, axis).astype(dtype)


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
    _check_array(owner, x)
    return Comm.of(axis_name, key, step)


def _check_array(owner: str, x: Any) -> None:
    dtype = getattr(x, "dtype", type(x).__name__)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{owner}: must get a float array of at most 32 bits, got {dtype}; cast it to float32, "
            "use the collective of jax.lax, or call it for each leaf of a tree, with its own key."
        )


def axis_of(owner: str, argument: str, axis: int, x: jax.Array) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{owner}({argument}): must be an axis of the array, got {axis} for shape {x.shape}; "
            "use 0, and reshape what has no axis."
        )
    return axis % x.ndim


def _likes(size: int) -> Likes:
    return (jax.ShapeDtypeStruct((size,), jnp.float32),)


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
    """Function: the whole of sharded parameters, whose gradient comes back compressed.

    For a loss under `jax.shard_map` with parameters sharded over the workers (FSDP, ZeRO-3). It is
    `jax.lax.all_gather(shard, axis_name, axis=dimension, tiled=True)`, but its gradient is
    `compressed_psum_scatter` of the cotangents: the *sum* over the workers, as with the gather of
    JAX. Divide the loss by their number for the mean. Any optimizer that treats each value by
    itself can follow, on the shards.

    A differentiated function keeps no state, so there is no error feedback: take unbiased codecs,
    such as the default, and a `step` that changes.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      gradients: the codec of the gradients' shards.
      parameters: the codec of the parameters; None gathers them as they are.
      dimension: the axis along which the shards follow each other.
      step: number of the step, equal on all workers.
      key: a seed or key, equal on all workers; another for each array of a model.

    Returns:
      The whole array, of the dtype of `shard`.

    Wire: forward as `compressed_all_gather`, or the shard itself; backward as
      `compressed_psum_scatter`.

    Claims: the gradient is unbiased if `gradients` is.

    Raises:
      TypeError: while tracing, if `shard` is no float array of at most 32 bits, or a codec none.

    Example:
      >>> def loss(shard, x):
      ...     w = fg.optimizers.gather_parameters(shard, "data", fg.Identity(), step=0)
      ...     return jnp.sum(w * x) / 2
      >>> shards, x = jnp.array([[1.0], [2.0]]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> jax.vmap(jax.grad(loss), axis_name="data")(shards, x)
      Array([[2.],
             [3.]], dtype=float32)

    References:
      Wang et al., 2023, arXiv:2306.10209; Jia et al., NeurIPS 2024, arXiv:2410.15526, which gathers
      differences: `fg.optimizers.sharded` does.
    """
    check_kind("gather_parameters(gradients)", gradients, Codec, REMEDY)
    if parameters is not None:
        check_kind("gather_parameters(parameters)", parameters, Codec, REMEDY)
    _axes.size(axis_name, "gather_parameters")
    _check_array("gather_parameters", shard)
    axis = axis_of("gather_parameters", "dimension", dimension, shard)

    @jax.custom_vjp
    def gather(shard: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
        if parameters is None:
            return lax.all_gather(shard, axis_name, axis=axis, tiled=True)
        whole = compressed_all_gather(
            shard, axis_name, parameters, gather_dimension=axis, step=step, key=key
        )
        return _axes.vary(whole, axis_name)  # each worker's loss has a gradient of its own

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
