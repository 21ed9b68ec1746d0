"""Compress and decompress single arrays, without an exchange."""

import math

import jax
import jax.numpy as jnp

from fftgrad._contracts import Codec, Like, Payload, Step
from fftgrad._values import check, check_kind
from fftgrad.codecs import _chain
from fftgrad.codecs._chain import payload_spec
from fftgrad.exchanges import _bucketing


def compress(codec: Codec, x: jax.Array, *, step: Step = Step()) -> Payload:
    """Function: compute the payload that a worker would send for the array `x`.

    Pure; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`. A codec with state starts from its
    initial state. To keep the state, call `codec.compress(x, state, step)` instead.

    Args:
      codec: a codec, or a chain of codecs.
      x: float32, bfloat16 or float16 array of any shape; flattened and cast to float32.
      step: `fg.Step.of(key)` with a new key for each call, for a codec with random numbers; also
        contains the step number, for a codec that changes by step.

    Returns:
      The payload, which takes `fg.wire_bytes(codec, like=x)` bytes with its header. `fg.decompress`
      with the same codec and `like=x` decodes it.

    Raises:
      ValueError: if `x` is empty, the codec does not fit the shape, or the codec needs random
        numbers and `step` has no key.

    Example:
      >>> codec, x = fg.TopK(k=2), jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0., -3.,  0.,  2.], dtype=float32)
    """
    check_kind("compress(codec)", codec, Codec, "pass a value such as TopK(fraction=0.01).")
    _bucketing.check_leaf("compress", "x", x)
    as_vector("compress(x)", x)
    vector = jnp.ravel(x).astype(jnp.float32)
    return _chain.compress(codec, vector, codec.init(vector), step).payload


def decompress(codec: Codec, payload: Payload, like: Like, *, step: Step = Step()) -> jax.Array:
    """Function: decode a payload to an array of the shape and dtype of `like`.

    Pure; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    Args:
      codec: the codec that made the payload.
      payload: the result of `fg.compress`.
      like: an array or `jax.ShapeDtypeStruct` with the shape and dtype of the result.
      step: the step passed to `fg.compress`; its local key is not used.

    Raises:
      ValueError: if the payload does not have the shapes that the codec makes of `like`.

    Example:
      >>> x = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)
      >>> codec = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.25), fg.RangeFloat(bits=10))
      >>> x_hat = fg.decompress(codec, fg.compress(codec, x), like=x)
      >>> x_hat.shape, bool(jnp.linalg.norm(x_hat - x) < 0.2 * jnp.linalg.norm(x))
      ((16, 16), True)
    """
    vector = jax.ShapeDtypeStruct((math.prod(like.shape),), jnp.float32)
    check_payload("decompress(payload)", codec, payload, vector)
    return _chain.decompress(codec, payload, vector, step).reshape(like.shape).astype(like.dtype)


def as_vector(argument: str, like: Like) -> Like:
    """Return the shape of the flattened array; refuse an empty array."""
    size = math.prod(like.shape)
    check(size > 0, argument, "not be empty", like.shape, "leave it out.")
    return jax.ShapeDtypeStruct((size,), jnp.float32)


def check_payload(name: str, codec: Codec, payload: Payload, vector: Like) -> None:
    """Refuse a payload with other shapes or dtypes than the codec's payloads."""
    check_kind(f"{name.partition('(')[0]}(codec)", codec, Codec, "pass a value such as TopK(k=9).")
    wanted = payload_spec(codec, vector)
    if jax.tree.structure(wanted) != jax.tree.structure(payload) or any(
        jax.ShapeDtypeStruct(a.shape, a.dtype) != _shape(b)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(payload), strict=True)
    ):
        raise ValueError(
            f"{name}: must be what {codec!r} makes of {vector.shape[0]} values, {wanted}, "
            f"got {jax.tree.map(_shape, payload)}; pass the codec and the shape it came from."
        )


def _shape(leaf: object) -> object:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
