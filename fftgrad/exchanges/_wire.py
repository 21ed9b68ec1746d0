"""Payloads as one uint32 buffer, so that they travel in one collective.

Bit-cast, because a collective may change the width of a dtype: XLA widens bfloat16 to float32 on
a CPU. Integers of 32 bits survive everywhere.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Like, PyTree
from fftgrad.ops import _rows

VERSION = 1
"""Layout of the header, in its top 16 bits. Another layout gets another number."""


class Header(NamedTuple):
    """The first two words of the buffer.

    Attributes:
      finite: whether everything that this worker had to send was finite.
      overflow: how many values its codecs could not represent.
    """

    finite: jax.Array
    overflow: jax.Array | int


HEADER_WORDS = 2


def pack(header: Header, payloads: PyTree) -> jax.Array:
    """The buffer: uint32[HEADER_WORDS + words of each main and side]."""
    flags = jnp.uint32(VERSION << 16) | header.finite.astype(jnp.uint32)
    head = jnp.stack([flags, jnp.asarray(header.overflow).astype(jnp.uint32)])
    return jnp.concatenate([head, *map(_to_words, jax.tree.leaves(payloads))])


def unpack(words: jax.Array, like: PyTree) -> tuple[Header, PyTree]:
    """The header and the payloads, shaped like `like`, that `pack` put into `words`.

    A buffer of another version counts as not finite, because its payloads mean something else.
    """
    finite = words[0] == jnp.uint32(VERSION << 16 | 1)
    header = Header(finite, words[1].astype(jnp.int32))
    leaves, structure = jax.tree.flatten(like)
    stops = itertools.accumulate(map(_words, leaves), initial=HEADER_WORDS)
    pieces = [words[a:b] for a, b in itertools.pairwise(stops)]
    return header, jax.tree.unflatten(structure, map(_from_words, pieces, leaves))


def nbytes(payloads: PyTree) -> int:
    """The size of the buffer, from shapes alone."""
    return 4 * (HEADER_WORDS + sum(map(_words, jax.tree.leaves(payloads))))


def _words(leaf: Like) -> int:
    return -(-math.prod(leaf.shape) * leaf.dtype.itemsize // 4)


def _to_words(leaf: jax.Array) -> jax.Array:
    flat: Any = leaf.ravel()
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=-1).ravel()
    per_word = 4 // flat.dtype.itemsize
    if per_word == 1:
        return lax.bitcast_convert_type(flat, jnp.uint32)
    return lax.bitcast_convert_type(_rows.rows(flat, per_word), jnp.uint32)


def _from_words(words: jax.Array, like: Like) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        pairs = lax.bitcast_convert_type(words, jnp.float32).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1]).reshape(like.shape)
    flat = lax.bitcast_convert_type(words, like.dtype).ravel()
    return flat[: math.prod(like.shape)].reshape(like.shape)
