"""Payloads in one uint32 buffer, so that one collective sends all of them.

Payloads are bit-cast to uint32, because XLA for CPUs widens bfloat16 to float32 in collectives.
"""

import functools
import math
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fftgrad._values import plain
from fftgrad.ops import _shapes
from fftgrad.ops._shapes import Like, PyTree

VERSION = 2
"""Version of the layout of payloads. Readers refuse payloads stored with another version."""


HEADER_WORDS = 1


@jax.custom_jvp
def without_gradient(payloads: PyTree, of: PyTree) -> PyTree:
    """Return `payloads`, and raise an error if they are differentiated by the values `of`.

    Codes have no derivative: a gradient through a payload would be zero without a warning.
    """
    del of
    return payloads


@functools.partial(without_gradient.defjvp, symbolic_zeros=True)
def _refuse_gradient(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> Any:
    for tangent in jax.tree.leaves(tangents[1], is_leaf=_is_zero):
        if not _is_zero(tangent):
            raise NotImplementedError(
                "a gradient through compressed values: must not be taken, because codes have no "
                f"derivative, got a tangent {jax.typeof(tangent)}; differentiate AllReduce() "
                "instead, or use jax.lax.stop_gradient(grads)."
            )
    return primals[0], tangents[0]


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, SymbolicZero)


def configuration(codec: object, like: Like) -> int:
    """Return a 32-bit checksum of the codec, the shape, the dtype and the version."""
    part = repr(plain(codec)), tuple(like.shape), jnp.dtype(like.dtype).name
    # The default `repr`, for example of a function, has an address that differs between processes.
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr((VERSION, [part])))
    return zlib.crc32(text.encode())


def pack(
    payloads: PyTree, finite: jax.Array | bool = True, overflow: jax.Array | int = 0
) -> jax.Array:
    """Return the buffer uint32[HEADER_WORDS + words of each main and side].

    The header holds a bit, 1 if all values that the worker sends are finite, and the overflow, up
    to 2^30 - 1.
    """
    flag = jnp.asarray(finite).astype(jnp.uint32)
    count = jnp.minimum(jnp.asarray(overflow, jnp.int32), (1 << 30) - 1)
    word = lax.bitcast_convert_type(count << 1, jnp.uint32) | flag
    return jnp.concatenate([word[None], *map(to_words, jax.tree.leaves(payloads))])


def unpack(words: jax.Array, like: PyTree) -> tuple[PyTree, jax.Array, jax.Array]:
    """Return the payloads in a buffer, with the shapes of `like`, the finite bit, the overflow."""
    overflow = lax.bitcast_convert_type(words[0], jnp.int32) >> 1
    return from_words(words[HEADER_WORDS:], like), (words[0] & 1) == 1, overflow


def nbytes(payloads: PyTree) -> int:
    return 4 * (HEADER_WORDS + sum(map(_words, jax.tree.leaves(payloads))))


def to_words(leaf: jax.Array) -> jax.Array:
    """Bit-cast a leaf to words uint32; pad the last word with zeros."""
    flat: Any = leaf.ravel()
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=-1).ravel()
    per_word = 4 // flat.dtype.itemsize
    if per_word == 1:
        return lax.bitcast_convert_type(flat, jnp.uint32)
    return lax.bitcast_convert_type(_shapes.rows(flat, per_word), jnp.uint32)


def from_words(words: jax.Array, like: PyTree) -> PyTree:
    """Invert `to_words` for consecutive leaves with the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    pieces = _shapes.cut(words, list(map(_words, leaves)))
    return jax.tree.unflatten(structure, map(_leaf, pieces, leaves))


def _words(leaf: Like) -> int:
    return -(-math.prod(leaf.shape) * leaf.dtype.itemsize // 4)


def _leaf(words: jax.Array, like: Like) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        pairs = lax.bitcast_convert_type(words, jnp.float32).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1]).reshape(like.shape)
    flat = lax.bitcast_convert_type(words, like.dtype).ravel()
    return flat[: math.prod(like.shape)].reshape(like.shape)
