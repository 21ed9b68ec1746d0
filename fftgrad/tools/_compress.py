"""One array through a codec, without any exchange."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import Codec, Like, Payload, Step
from fftgrad._values import check_kind
from fftgrad.codecs import _chain
from fftgrad.codecs._chain import payload_spec
from fftgrad.exchanges import _bucketing
from fftgrad.exchanges._parts import Parts


def compress(codec: Codec, x: jax.Array, *, step: Step = Step()) -> Payload:
    """Function: what a worker would send for the array `x`.

    Pure; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`. A codec that remembers something
    acts as it does before its first step; `codec.compress(x, state, step)` takes its state along.

    Args:
      codec: a codec, or a chain of codecs.
      x: float32, bfloat16 or float16 array of any shape; it is flattened, in row-major order, and
        cast to float32.
      step: randomness for codecs that draw, `fg.Step.of(key)`, with another key for each call; and
        the number of the step, for codecs that change by step.

    Returns:
      The payload, in `fg.wire_bytes(codec, like=x)` bytes, header included. `fg.decompress` with
      the same codec and `like=x` gives the array back.

    Raises:
      ValueError: if `x` is empty, the codec does not fit the shape, or it draws and the step has no
        key.

    Example:
      >>> codec, x = fg.TopK(k=2), jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0., -3.,  0.,  2.], dtype=float32)
    """
    check_kind("compress(codec)", codec, Codec, "pass a value such as TopK(fraction=0.01).")
    _bucketing.check_leaf("compress", "x", x)
    if not x.size:
        raise ValueError(
            f"compress(x): must have a value at least, got shape {x.shape}; leave empty arrays out."
        )
    vector = jnp.ravel(x).astype(jnp.float32)
    return _chain.compress(codec, vector, codec.init(vector), step).payload


def decompress(codec: Codec, payload: Payload, like: Like, *, step: Step = Step()) -> jax.Array:
    """Function: the array, shaped like `like` and of its dtype, that a payload stands for.

    Pure; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    Args:
      codec: the codec that made the payload.
      payload: what `fg.compress` returned.
      like: an array or `jax.ShapeDtypeStruct` with the shape and dtype wanted.
      step: that given to `fg.compress`; its local key is not used.

    Raises:
      ValueError: if the payload is not of the shapes that the codec makes of `like`.

    Example:
      >>> x = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)
      >>> codec = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.25), fg.RangeFloat(bits=10))
      >>> x_hat = fg.decompress(codec, fg.compress(codec, x), like=x)
      >>> x_hat.shape, bool(jnp.linalg.norm(x_hat - x) < 0.2 * jnp.linalg.norm(x))
      ((16, 16), True)
    """
    vector = jax.ShapeDtypeStruct((math.prod(like.shape),), jnp.float32)
    check_payload("decompress(payload)", codec, payload, vector, ())
    return _chain.decompress(codec, payload, vector, step).reshape(like.shape).astype(like.dtype)


def decompress_mean(
    codec: Codec, payloads: Payload, like: Like, *, step: Step = Step()
) -> jax.Array:
    """Function: the mean of the arrays that several payloads stand for, as `AllGather` finds it.

    For payloads that travel by other means than a collective. They are added in their order, sparse
    ones in place, and a transform is undone once for all of them.

    Args:
      codec: the codec that made the payloads.
      payloads: what `fg.compress` returned to each of w workers, stacked: leaves [w, ...].
      like: as for `fg.decompress`, and so is `step`.
      step: that given to `fg.compress`.

    Raises:
      TypeError: if the payloads are a list.
      ValueError: if they are not of the shapes that the codec makes of `like`, stacked. Shapes are
        all there is to tell by: 20 and 21 signs are packed alike.

    Example:
      >>> x, codec = jnp.array([[4.0, 1.0], [1.0, 2.0]]), fg.TopK(k=1)
      >>> payloads = jax.vmap(lambda row: fg.compress(codec, row))(x)
      >>> fg.tools.decompress_mean(codec, payloads, like=x[0])
      Array([2., 1.], dtype=float32)
    """
    several: Any = payloads
    if isinstance(several, list | tuple) and any(isinstance(one, Payload) for one in several):
        raise TypeError(
            "decompress_mean(payloads): must be one payload with a row for each worker, got "
            f"{len(several)} payloads; stack them by jax.tree.map(lambda *x: jnp.stack(x), "
            "*payloads)."
        )
    vector = jax.ShapeDtypeStruct((math.prod(like.shape),), jnp.float32)
    payloads = jax.tree.map(jnp.asarray, payloads)
    leaves = jax.tree.leaves(payloads)
    workers = leaves[0].shape[:1] if leaves and leaves[0].ndim else (1,)
    check_payload("decompress_mean(payloads)", codec, payloads, vector, max(workers, (1,)))
    start = _axes.vary_like(jnp.zeros(()), leaves[0])
    (mean,) = Parts((codec,)).mean((payloads,), (vector,), start, step)
    return mean.reshape(like.shape).astype(like.dtype)


def check_payload(
    name: str, codec: Codec, payload: Payload, vector: Like, workers: tuple[int, ...]
) -> None:
    """Refuses what is no codec, and a payload that it cannot have made."""
    check_kind(f"{name.partition('(')[0]}(codec)", codec, Codec, "pass a value such as TopK(k=9).")
    wanted = payload_spec(codec, vector)
    if jax.tree.structure(wanted) != jax.tree.structure(payload) or any(
        jax.ShapeDtypeStruct((*workers, *a.shape), a.dtype) != _shape(b)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(payload), strict=True)
    ):
        of_each = f", of each of {workers[0]} workers" if workers else ""
        raise ValueError(
            f"{name}: must be what {codec!r} makes of {vector.shape[0]} values, {wanted}{of_each}, "
            f"got {jax.tree.map(_shape, payload)}; pass the codec and the shape it came from."
        )


def _shape(leaf: object) -> object:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
