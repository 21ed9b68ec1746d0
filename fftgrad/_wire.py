"""A payload as one uint32 buffer, so that it travels in one collective.

Bit-cast, because a collective may change the width of a dtype: XLA widens bfloat16 to float32 on
a CPU. Integers of 32 bits survive everywhere.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._base import Like, Payload

VERSION = 1
"""Layout of the header, in its top 16 bits. Another layout gets another number."""


class Header(NamedTuple):
    """The first two words of the buffer.

    Attributes:
      finite: whether everything that this worker had to send was finite.
      overflow: how many values its codec could not represent.
    """

    finite: jax.Array
    overflow: jax.Array


HEADER_WORDS = 2


def pack(header: Header, payload: Payload) -> jax.Array:
    """The buffer: uint32[HEADER_WORDS + words of main + words of side]."""
    flags = jnp.uint32(VERSION << 16) | header.finite.astype(jnp.uint32)
    head = jnp.stack([flags, header.overflow.astype(jnp.uint32)])
    return jnp.concatenate([head, *map(_to_words, jax.tree.leaves(payload[:2]))])


def unpack(words: jax.Array, like: Payload) -> tuple[Header, Payload]:
    """The header and the payload that `pack` put into `words`."""
    header = Header((words[0] & 1).astype(bool), words[1].astype(jnp.int32))
    leaves, structure = jax.tree.flatten(like[:2])
    out: list[jax.Array] = []
    start = HEADER_WORDS
    for leaf in leaves:
        stop = start + _words(leaf)
        out.append(_from_words(words[start:stop], leaf))
        start = stop
    main, side = jax.tree.unflatten(structure, out)
    return header, Payload(main, side, header.overflow)


def nbytes(payload: Payload) -> int:
    """The size of the buffer, from shapes alone."""
    return 4 * (HEADER_WORDS + sum(map(_words, jax.tree.leaves(payload[:2]))))


def _words(leaf: Like) -> int:
    return -(-math.prod(leaf.shape) * leaf.dtype.itemsize // 4)


def _to_words(leaf: jax.Array) -> jax.Array:
    flat: Any = leaf.ravel()
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=-1).ravel()
    per_word = 4 // flat.dtype.itemsize
    if per_word == 1:
        return lax.bitcast_convert_type(flat, jnp.uint32)
    padded = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(padded, jnp.uint32)


def _from_words(words: jax.Array, like: Like) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        pairs = lax.bitcast_convert_type(words, jnp.float32).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1]).reshape(like.shape)
    flat = lax.bitcast_convert_type(words, like.dtype).ravel()
    return flat[: math.prod(like.shape)].reshape(like.shape)
