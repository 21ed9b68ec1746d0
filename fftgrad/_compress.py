"""One array through a codec, without any exchange."""

import math

import jax
import jax.numpy as jnp

from fftgrad import _tree
from fftgrad._base import Codec, Exchange, Like, Payload, PyTree, Rng, payload_spec
from fftgrad.exchanges._all_gather import AllGather


def compress(codec: Codec, x: jax.Array, *, rng: Rng | None = None) -> Payload:
    """Function: what a worker would send for the array `x`.

    Pure; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    Args:
      codec: a codec, or a chain of codecs.
      x: float32, bfloat16 or float16 array of any shape; it is flattened, in row-major order, and
        cast to float32.
      rng: randomness for codecs that draw, `fg.Rng.of(key)`; use another key for each call.

    Returns:
      The payload. `fg.decompress` with the same codec and `like=x` gives the array back.

    Shapes: x float[...] -> main and side as the codec states.

    Wire: `fg.wire_bytes(codec, like=x)` bytes, header included.

    Raises:
      TypeError: if `x` is not a floating-point array of at most 32 bits.
      ValueError: while tracing, if `x` is empty, the codec does not fit the shape, or it draws
        and `rng` is None.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> codec = fg.TopK(k=2)
      >>> x = jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0., -3.,  0.,  2.], dtype=float32)
    """
    _tree.check_leaf("compress", "x", x)
    if not x.size:
        raise ValueError(
            f"compress(x): must have a value at least, got shape {x.shape}; leave empty arrays out."
        )
    return codec.compress(jnp.ravel(x).astype(jnp.float32), rng)


def decompress(codec: Codec, payload: Payload, like: Like, *, rng: Rng | None = None) -> jax.Array:
    """Function: the array that a payload stands for.

    Pure; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    Args:
      codec: the codec that made the payload.
      payload: what `fg.compress` returned.
      like: an array or `jax.ShapeDtypeStruct` with the shape and dtype wanted.
      rng: the randomness given to `fg.compress`; only its shared key is used.

    Returns:
      An array with the shape and dtype of `like`.

    Raises:
      ValueError: while tracing, if the payload is not of the shape that the codec makes of `like`.

    Example:
      >>> import fftgrad as fg
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)
      >>> codec = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.25), fg.RangeFloat(bits=10))
      >>> x_hat = fg.decompress(codec, fg.compress(codec, x), like=x)
      >>> x_hat.shape, bool(jnp.linalg.norm(x_hat - x) < 0.2 * jnp.linalg.norm(x))
      ((16, 16), True)
    """
    vector = jax.ShapeDtypeStruct((math.prod(like.shape),), jnp.float32)
    wanted = payload_spec(codec, vector)
    if jax.tree.structure(wanted[:2]) != jax.tree.structure(payload[:2]) or any(
        a.shape != b.shape or a.dtype != b.dtype
        for a, b in zip(jax.tree.leaves(wanted[:2]), jax.tree.leaves(payload[:2]), strict=True)
    ):
        raise ValueError(
            f"decompress(payload): must be what {codec!r} makes of {math.prod(like.shape)} "
            f"values, {wanted[:2]}, got {payload[:2]}; pass the codec and the shape it came from."
        )
    return codec.decompress(payload, vector, rng).reshape(like.shape).astype(like.dtype)


def wire_bytes(
    part: Codec | Exchange,
    like: PyTree,
    scope: _tree.Scope = "model",
    bucket_bytes: int | None = None,
) -> int:
    """Function: the exact number of bytes that one worker hands to the collective per step.

    Found from shapes alone. The bytes are those of the concrete wire buffer, with its header, and
    those of the collective in the compiled program; `fg.audit` reads them off there. How often a
    byte crosses a link is the collective's business: in a ring of w workers an all-gather sends
    each buffer w - 1 times, an all-reduce 2 (w - 1) / w times.

    Args:
      part: a codec, or an exchange.
      like: an array, a `jax.ShapeDtypeStruct`, or a pytree of them: the gradient.
      scope: what is compressed on its own, as for `compressed_pmean`.
      bucket_bytes: the most float32 bytes of gradient in one collective, as there.

    Returns:
      Bytes, as a Python int.

    Wire: this function defines it: header (8 bytes) + main + side, each rounded up to 4 bytes.

    Raises:
      ValueError: if the bytes change by step (`Piecewise`): ask one of its exchanges, `.at(step)`.

    Example:
      >>> import fftgrad as fg
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1_000_000,), "float32")
      >>> fg.wire_bytes(fg.AllReduce(), x)
      4000000
      >>> fg.wire_bytes(fg.chain(fg.TopK(fraction=0.01), fg.RangeFloat(bits=6)), x)
      18216
    """
    exchange = part if isinstance(part, Exchange) else AllGather(part)
    buckets = _tree.buckets(like, _tree.layout("wire_bytes", scope, bucket_bytes))
    return sum(map(exchange.wire_bytes, buckets))
