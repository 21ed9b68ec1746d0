"""Collectives for what is sharded over the axis of the workers themselves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Codec, Step
from fftgrad._values import check_kind
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers import UniformLevels
from fftgrad.codecs.transforms import Hadamard
from fftgrad.exchanges import _halves
from fftgrad.exchanges._parts import Likes, Parts
from fftgrad.ops._keys import as_key
from fftgrad.training._own_step import own_step

EIGHT = UniformLevels(bits=8, bucket=256, norm="max")
FOUR = chain(Hadamard(block=256), UniformLevels(bits=4, bucket=256, norm="max"))


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

    Each worker cuts `x` along an axis into a shard for each worker, compresses each shard and sends
    it to its owner, who decodes and sums what it got. It is what FSDP and ZeRO do with gradients.

    With error feedback the caller keeps what was not sent:

        out = fg.optimizers.compressed_psum_scatter(gradient + residual, "data", codec)
        residual = gradient + residual - out.sent

    Args:
      x: float array of at most 32 bits; its length along `scatter_dimension` is a multiple of the
        number of workers w.
      axis_name: the axis, or axes, of the workers.
      codec: of one shard, a vector of x.size / w values; a number of coefficients to keep, such as
        TopK's k, is that of the whole `x`. The default is 4 bits after a rotation.
      scatter_dimension: the axis of `x` that is cut.
      step: number of the step, equal on all workers: codecs draw anew in each. Leave it out only
        where nothing is drawn, because draws that are the same in each step add up to a bias.
      key: a seed or key, equal on all workers.

    Returns:
      A `Scattered`.

    Wire: w buffers, each of 8 bytes and the payload of x.size / w values.

    Claims: unbiased if the codec is. A shard of which any worker had something that is not finite,
      or whose buffers are not of this codec and step, is NaN throughout on its owner, and there
      only.

    Raises:
      ValueError: while tracing, if the axis of `x` is no multiple of the number of workers, or
        `axis_name` is not bound.
      TypeError: while tracing, if `x` is no float array of at most 32 bits, or `codec` no codec.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0, -3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
      >>> scatter = lambda x: fg.optimizers.compressed_psum_scatter(x, "data", fg.Identity()).shard
      >>> jax.vmap(scatter, axis_name="data")(x)
      Array([[2., 4.],
             [0., 8.]], dtype=float32)

    References:
      Wang et al., "ZeRO++", 2023, arXiv:2306.10209; Jia et al., "SDP4Bit", NeurIPS 2024,
      arXiv:2410.15526.
    """
    owner = "compressed_psum_scatter"
    workers, moment = _start(owner, x, codec, axis_name, step, key)
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
    got = _halves.to_owners(parts, (rows,), before, likes, moment, axis_name)
    shape = (front.shape[0] // workers, *front.shape[1:])
    shard = workers * got.means[0].reshape(shape)
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

    With a `reference`, the array as all workers had it before, each sends the *difference* of its
    shard from that. What one gather loses is then part of the next difference: the result stays
    near to the shards, whatever the codec, where quantized values would keep their error.
    Parameters differ little from one step to the next, so a few bits do.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      codec: of the vector of shard.size values, as it is: TopK's k is that of each worker's shard,
        and not of the whole. The default has 8 bits a value.
      reference: what the last gather returned, the same bits on all workers; none sends values.
      gather_dimension: the axis along which the shards follow each other.
      step: number of the step, equal on all workers: codecs draw anew in each. Leave it out only
        where nothing is drawn, because draws that are the same in each step add up to a bias.
      key: a seed or key, equal on all workers.

    Returns:
      The whole array, the same bits on all workers, of the dtype of `reference`, or of `shard`.

    Wire: one buffer, of `fg.wire_bytes(codec, shard)` bytes: 8 and the payload of shard.size
      values. A ring sends it w - 1 times.

    Claims: if anything is not finite anywhere, or any buffer is not of this codec and step, the
      result is NaN throughout, on all workers.

    Raises:
      ValueError: while tracing, if `reference` is not of the shape of the result, or `axis_name` is
        not bound.
      TypeError: while tracing, if `shard` is no float array of at most 32 bits, or `codec` none.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> shards, before = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1.0, 2.0, 2.5, 4.5])
      >>> from fftgrad.optimizers import compressed_all_gather
      >>> gather = lambda s: compressed_all_gather(s, "data", fg.Sign(), reference=before)
      >>> jax.vmap(gather, axis_name="data")(shards)[0]
      Array([1., 2., 3., 4.], dtype=float32)

    References:
      Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism",
      NeurIPS 2024, arXiv:2410.15526.
    """
    owner = "compressed_all_gather"
    workers, moment = _start(owner, shard, codec, axis_name, step, key)
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
    whole = (workers * front.shape[0], *front.shape[1:])
    sends, before = front.ravel(), None
    if reference is not None:
        before = jnp.moveaxis(reference.astype(jnp.float32), axis, 0).reshape(workers, -1)
        sends = sends - jnp.take(before, _axes.index(axis_name), axis=0)
    buffer, _, _ = _halves.compress(parts, (sends,), parts.init(likes), likes, moment)
    _, (rows,) = _halves.to_all(parts, buffer, likes, moment, axis_name)
    rows = rows if before is None else before + rows
    out = jnp.moveaxis(rows.reshape(whole), 0, axis)
    return out.astype(dtype)


def _start(
    owner: str,
    x: jax.Array,
    codec: Codec,
    axis_name: AxisName,
    step: jax.Array | int,
    key: jax.Array | int,
) -> tuple[int, Step]:
    check_kind(f"{owner}(codec)", codec, Codec, "pass UniformLevels(bits=8).")
    workers = _axes.size(axis_name, owner)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{owner}: must get a float array of at most 32 bits, got {x.dtype}; cast it to "
            "float32, or use the collective of jax.lax."
        )
    return workers, own_step(as_key(key), step, 0, axis_name)


def axis_of(owner: str, argument: str, axis: int, x: jax.Array) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{owner}({argument}): must be an axis of the array, got {axis} for shape {x.shape}; "
            "use 0, and reshape what has no axis."
        )
    return axis % x.ndim


def _likes(size: int) -> Likes:
    return (jax.ShapeDtypeStruct((size,), jnp.float32),)
