"""A gather in a loss, whose gradient comes back compressed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import AxisName, Codec
from fftgrad._values import check_kind
from fftgrad.ops._keys import as_key
from fftgrad.optimizers._scatter import (
    FOUR,
    axis_of,
    compressed_all_gather,
    compressed_psum_scatter,
)


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

    In a loss under `jax.shard_map`, with parameters sharded over the axis of the workers (FSDP,
    ZeRO-3), it is `jax.lax.all_gather(shard, axis_name, axis=dimension, tiled=True)`, whose
    gradient is `compressed_psum_scatter` of the cotangents: the *sum* over the workers. Divide the
    loss by their number for the mean, as with the gather of JAX. Nothing is left to average then,
    and any optimizer of one value at a time can follow, on the shards.

    A function of JAX's differentiation keeps no state, so there is no feedback here: take codecs
    that are unbiased, such as the default, with a `step` that changes. It has no default, because
    draws that are the same in each step add up to a bias.

    Args:
      shard: this worker's float array.
      axis_name: the axis, or axes, of the workers.
      gradients: the codec of the gradients' shards.
      parameters: the codec of the parameters; None gathers them as they are.
      dimension: the axis along which the shards follow each other.
      step: number of the step, equal on all workers: codecs draw anew in each.
      key: a seed or key, equal on all workers; another for each array of a model.

    Returns:
      The whole array, of the dtype of `shard`.

    Wire: forward as `compressed_all_gather`, or the shard itself; backward as
      `compressed_psum_scatter`.

    Claims: the gradient is unbiased if `gradients` is.

    Raises:
      ValueError: while tracing, if `axis_name` is not bound.
      TypeError: while tracing, if `shard` is no float array of at most 32 bits, or a codec none.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> def loss(shard, x):
      ...     w = fg.optimizers.gather_parameters(shard, "data", fg.Identity(), step=0)
      ...     return jnp.sum(w * x) / 2
      >>> shards, x = jnp.array([[1.0], [2.0]]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> jax.vmap(jax.grad(loss), axis_name="data")(shards, x)
      Array([[2.],
             [3.]], dtype=float32)

    References:
      Wang et al., "ZeRO++", 2023, arXiv:2306.10209; Jia et al., "SDP4Bit", NeurIPS 2024,
      arXiv:2410.15526, which gathers differences: `fg.optimizers.sharded` does.
    """
    for argument, codec in (("gradients", gradients), ("parameters", parameters)):
        if codec is not None:
            check_kind(
                f"gather_parameters({argument})", codec, Codec, "pass UniformLevels(bits=8)."
            )
    _axes.size(axis_name, "gather_parameters")
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
    return gather(shard, jnp.asarray(step), as_key(key))
