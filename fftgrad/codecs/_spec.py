"""What a codec makes of a vector, from shapes alone."""

import functools
from typing import Any

import jax

from fftgrad._contracts import Codec, Like, Payload, PyTree, Step
from fftgrad.codecs import _call
from fftgrad.ops import _platform
from fftgrad.ops._shapes import spec


def payload_spec(codec: Codec, like: Like) -> Payload:
    """The shapes and dtypes of a payload."""
    return _spec(codec, like.shape, like.dtype)[0]


def counts_overflow(codec: Codec, like: Like) -> bool:
    """Whether the codec counts values that it cannot represent."""
    return _spec(codec, like.shape, like.dtype)[1]


# Each spec traces the codec, and one step asks for the same ones many times. A codec is a value,
# so it can be a key.
@functools.lru_cache(maxsize=4096)
def _spec(codec: Codec, shape: tuple[int, ...], dtype: Any) -> tuple[Payload, bool]:
    like = jax.ShapeDtypeStruct(shape, dtype)
    counts = False

    def payload(x: jax.Array, state: PyTree) -> Payload:
        nonlocal counts
        out = _call.compress(codec, x, state, Step.of(0))
        counts = not isinstance(out.overflow, int)
        return out.payload

    with _platform.one():
        state = jax.eval_shape(lambda: codec.init(like))
        # Shapes and dtypes only: what else JAX notes there belongs to where it was asked first.
        shapes = spec(jax.eval_shape(payload, like, state))
    return shapes, counts
