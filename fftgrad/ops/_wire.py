"""Payloads as one uint32 buffer, so that they travel in one collective.

Bit-cast, because a collective may change the width of a dtype: XLA widens bfloat16 to float32 on
a CPU. Integers of 32 bits survive everywhere.
"""

import functools
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fftgrad._values import plain
from fftgrad.ops import _hash, _joined, _rows
from fftgrad.ops._shapes import Like, PyTree

VERSION = 2
"""Layout of buffers and payloads. Another layout gets another number, and so other checksums."""


class Header(NamedTuple):
    """What the first two words of the buffer say.

    Attributes:
      finite: whether everything that this worker had to send was finite.
      overflow: how many values its codecs could not represent, below 2^30.
      valid: whether the buffer is as a worker of the same configuration made it in the same step.
    """

    finite: jax.Array | bool
    overflow: jax.Array | int
    valid: jax.Array | bool = True


NOTHING = Header(True, 0)
"""That all is well, and nothing is counted."""

HEADER_WORDS = 2


@jax.custom_jvp
def without_gradient(payloads: PyTree, of: PyTree) -> PyTree:
    """Return `payloads`, and refuse to differentiate them by the values `of` that they stand for.

    Bits have no derivative: without this, a gradient through a payload is zero.
    """
    del of
    return payloads


@functools.partial(without_gradient.defjvp, symbolic_zeros=True)
def _refuse_gradient(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> Any:
    for tangent in jax.tree.leaves(tangents[1], is_leaf=_is_zero):
        if not _is_zero(tangent):
            raise NotImplementedError(
                "a gradient through compressed values: must not be taken, because codes and bits "
                f"have no derivative, got a tangent {jax.typeof(tangent)} of what is compressed; "
                "differentiate a step with AllReduce() instead, or stop it there by "
                "jax.lax.stop_gradient(grads)."
            )
    return primals[0], tangents[0]


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, SymbolicZero)


def configuration(codecs: Sequence[object], likes: Sequence[Like]) -> int:
    """A number of 32 bits that other codecs, shapes, dtypes and versions do not have."""
    parts = [
        (repr(plain(codec)), tuple(like.shape), jnp.dtype(like.dtype).name)
        for codec, like in zip(codecs, likes, strict=True)
    ]
    # What has no repr of its own, as a function, prints its address, another in each process.
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr((VERSION, parts)))
    return zlib.crc32(text.encode())


def seed(made_by: int, number: jax.Array | int, skipped: jax.Array | int) -> jax.Array:
    """What the checksum starts from: another one in each step, and in each configuration."""
    number, skipped = (jnp.asarray(n).astype(jnp.uint32) for n in (number, skipped))
    # Odd, so that no two numbers of steps have the same.
    moved = number * jnp.uint32(0x9E3779B1) + skipped * jnp.uint32(0x85EBCA6B)
    return moved + jnp.uint32(made_by)


def pack(header: Header, payloads: PyTree, seed: jax.Array) -> jax.Array:
    """The buffer: uint32[HEADER_WORDS + words of each main and side]."""
    flag = jnp.asarray(header.finite).astype(jnp.uint32)
    count = jnp.minimum(jnp.asarray(header.overflow, jnp.int32), (1 << 30) - 1)
    word = lax.bitcast_convert_type(count << 1, jnp.uint32) | flag
    # Kept: the checksum would find all that is sent again, from the values that it comes of.
    body = lax.optimization_barrier(
        jnp.concatenate([word[None], *map(to_words, jax.tree.leaves(payloads))])
    )
    own = _checksum(body, seed)
    return jnp.concatenate([jnp.where(header.valid, own, ~own)[None], body])


def unpack(words: jax.Array, like: PyTree, seed: jax.Array) -> tuple[Header, PyTree]:
    """The header and the payloads, shaped like `like`, that `pack` put into `words`.

    A buffer that is not valid counts as not finite, because its payloads mean something else.
    """
    valid = words[0] == _checksum(words[1:], seed)
    finite = valid & ((words[1] & 1) == 1)
    header = Header(finite, lax.bitcast_convert_type(words[1], jnp.int32) >> 1, valid)
    return header, from_words(words[HEADER_WORDS:], like)


def count_invalid(headers: Header) -> jax.Array:
    """How many of the buffers, whose headers are stacked, are not valid."""
    return jnp.sum(~jnp.asarray(headers.valid), dtype=jnp.int32)


def nbytes(payloads: PyTree) -> int:
    """The size of the buffer, from shapes alone."""
    return 4 * (HEADER_WORDS + sum(map(_words, jax.tree.leaves(payloads))))


def to_words(leaf: jax.Array) -> jax.Array:
    """The bits of a leaf, the last word filled with zeros."""
    flat: Any = leaf.ravel()
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=-1).ravel()
    per_word = 4 // flat.dtype.itemsize
    if per_word == 1:
        return lax.bitcast_convert_type(flat, jnp.uint32)
    return lax.bitcast_convert_type(_rows.rows(flat, per_word), jnp.uint32)


def from_words(words: jax.Array, like: PyTree) -> PyTree:
    """The leaves, shaped like `like`, whose words follow each other."""
    leaves, structure = jax.tree.flatten(like)
    pieces = _joined.cut(words, list(map(_words, leaves)))
    return jax.tree.unflatten(structure, map(_leaf, pieces, leaves))


def _checksum(words: jax.Array, seed: jax.Array) -> jax.Array:
    """Another number for each seed, and for each value of any one word, uint32[].

    Each word goes through a bijection of its position. Summed as it is, times an odd number, two
    signs flipped together would cancel.
    """
    return seed + jnp.sum(_hash.bits(jnp.uint32(0), words, words.size), dtype=jnp.uint32)


def _words(leaf: Like) -> int:
    return -(-math.prod(leaf.shape) * leaf.dtype.itemsize // 4)


def _leaf(words: jax.Array, like: Like) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        pairs = lax.bitcast_convert_type(words, jnp.float32).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1]).reshape(like.shape)
    flat = lax.bitcast_convert_type(words, like.dtype).ravel()
    return flat[: math.prod(like.shape)].reshape(like.shape)
