"""Calls of a codec, which may be one's own, and a clear answer where it breaks the contract.

All of it is decided while tracing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fftgrad._contracts import Codec, Compressed, Like, Payload, PyTree, Step
from fftgrad.ops import _wire


def compress(codec: Codec, x: jax.Array, state: PyTree, step: Step) -> Compressed:
    """`codec.compress(x, state, step)`."""
    name = f"{type(codec).__name__}.compress()"
    out: object = codec.compress(x, state, step)
    if not isinstance(out, Compressed):
        raise TypeError(
            f"{name}: must return a Compressed, got {type(out).__name__}; return "
            "fg.Compressed(fg.Payload(main))."
        )
    payload: object = out.payload
    if not isinstance(payload, Payload):
        raise TypeError(
            f"{name}: must return a Compressed with a Payload, got one with {payload!r}; return "
            "fg.Compressed(fg.Payload(main))."
        )
    if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(payload.main)):
        return out
    codes = _wire.without_gradient(payload.main, x)
    return out._replace(payload=payload._replace(main=codes))


def decompress(codec: Codec, payload: Payload, like: Like, step: Step) -> jax.Array:
    """`codec.decompress(payload, like, step)`."""
    out = codec.decompress(payload, like, step)
    if _say(out) != _say(like):
        raise TypeError(
            f"{type(codec).__name__}.decompress(): must return what it is given as `like`, "
            f"{_say(like)}, got {_say(out)}; reshape it, and cast it by .astype(like.dtype)."
        )
    return out


def _say(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
