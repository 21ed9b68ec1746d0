"""Payloads as bytes, for what is no collective: files, object storage, a parameter server."""

import itertools
import math
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Like, Payload
from fftgrad._values import check_kind
from fftgrad.codecs._chain import payload_spec
from fftgrad.ops import _wire
from fftgrad.tools._compress import check_payload

MAGIC = b"FFTG"
VERSION = 1
"""Layout of what is around the words. That of the words is in the configuration."""

HEAD = struct.Struct("<4sHHIQ")
"""Magic, version, zero, configuration, bytes of the payload."""

TAIL = struct.Struct("<I")


def to_bytes(payload: Payload, codec: Codec, like: Like) -> bytes:
    """Function: a payload as bytes, for storage and for transports that are no collective.

    The format is that of docs/wire-format.md, the same on every machine. The bytes hold only a
    checksum of codec and shape: keep both, and the step of a codec that draws.

    Args:
      payload: what `fg.compress` returned; not under `jax.jit`, where there are no values.
      codec: the codec that made it.
      like: an array or `jax.ShapeDtypeStruct` of the shape that was compressed.

    Returns:
      `fg.wire_bytes(codec, like)` + 20 bytes, which `fg.tools.from_bytes` reads.

    Example:
      >>> codec, x = fg.TopK(k=1), jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> data = fg.tools.to_bytes(fg.compress(codec, x), codec, x)
      >>> len(data), data[:4]
      (32, b'FFTG')
    """
    payload = jax.tree.map(jnp.asarray, payload)
    check_payload("to_bytes(payload)", codec, payload, _vector("to_bytes", like), ())
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
    words = b"".join(leaf + bytes(-len(leaf) % 4) for leaf in leaves)
    data = HEAD.pack(MAGIC, VERSION, 0, _configuration(codec, like), len(words)) + words
    return data + TAIL.pack(zlib.crc32(data))


def from_bytes(data: bytes | bytearray | memoryview, codec: Codec, like: Like) -> Payload:
    """Function: the payload, bit for bit, that `to_bytes` made these bytes of.

    The bytes may come from anywhere: their size is checked first, nothing is executed, and no more
    memory is taken than a valid payload needs. A checksum finds damage, not who sent it.

    Args:
      data: what `fg.tools.to_bytes` returned.
      codec: the codec that made the payload.
      like: an array or `jax.ShapeDtypeStruct` of the shape that was compressed.

    Raises:
      ValueError: if the bytes were cut off, have others behind them, were altered anywhere, are of
        another format or version, or were made by another codec or from another shape.

    Example:
      >>> codec, x = fg.TopK(k=1), jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> data = fg.tools.to_bytes(fg.compress(codec, x), codec, x)
      >>> fg.decompress(codec, fg.tools.from_bytes(data, codec, x), like=x)
      Array([ 0., -3.,  0.,  0.], dtype=float32)
    """
    if not isinstance(data, bytes | bytearray | memoryview) or not memoryview(data).c_contiguous:
        raise TypeError(
            f"from_bytes(data): must be bytes, one after the other, got {type(data).__name__}; "
            "read a file as path.read_bytes()."
        )
    check_kind("from_bytes(codec)", codec, Codec, "pass a value such as TopK(k=9).")
    spec, view = payload_spec(codec, _vector("from_bytes", like)), memoryview(data).cast("B")
    fault = _fault(view, spec, codec, like)
    if fault:
        raise ValueError(f"from_bytes(data): {fault}")
    leaves, structure = jax.tree.flatten(spec)
    values = [
        np.frombuffer(view[start:end], leaf.dtype).reshape(leaf.shape)
        for leaf, (start, end, _) in zip(leaves, _places(leaves), strict=True)
    ]
    return jax.tree.unflatten(structure, map(jnp.array, values))


def _fault(view: memoryview, spec: Payload, codec: Codec, like: Like) -> str:
    """What is wrong with the bytes; nothing, if nothing is."""
    size, made_by = _size(spec), f"{codec!r} and {tuple(like.shape)}"
    wanted = HEAD.size + size + TAIL.size
    length = f"must have {wanted} bytes for {made_by}, got {view.nbytes}; fetch it anew."
    if view.nbytes < HEAD.size + TAIL.size:
        return length
    magic, version, zero, configuration, told = HEAD.unpack_from(view)
    if magic != MAGIC:
        return f"must start with {MAGIC!r}, got {magic!r}; pass what fg.tools.to_bytes returned."
    if (version, zero) != (VERSION, 0):
        return (
            f"must be of version {VERSION}, 0, got {version}, {zero}; read it with the fftgrad "
            "that wrote it."
        )
    if configuration != _configuration(codec, like):
        return (
            f"must be made by {made_by}, got that of another codec, shape or wire format; pass "
            "those it was made by."
        )
    if view.nbytes != wanted:
        return length
    if told != size:
        return f"must say that {size} bytes follow, got {told}; fetch it anew."
    (checksum,) = TAIL.unpack_from(view, wanted - TAIL.size)
    found = zlib.crc32(view[: -TAIL.size])
    if checksum != found:
        return f"must end with its checksum, {found:#010x}, got {checksum:#010x}; fetch it anew."
    if any(any(view[end:filled]) for _, end, filled in _places(jax.tree.leaves(spec))):
        return (
            "must have zeros where a word has no value, got others; pass what fg.tools.to_bytes "
            "returned."
        )
    return ""


def _size(spec: Payload) -> int:
    """The bytes of the words of a payload."""
    return _wire.nbytes(spec) - _wire.nbytes(())


def _vector(owner: str, like: Like) -> Like:
    if not math.prod(like.shape):
        raise ValueError(
            f"{owner}(like): must have a value at least, got shape {tuple(like.shape)}; leave "
            "empty arrays out."
        )
    return jax.ShapeDtypeStruct((math.prod(like.shape),), jnp.float32)


def _configuration(codec: Codec, like: Like) -> int:
    # In float32, to which every array is cast: the payload is the same.
    return _wire.configuration((codec,), (jax.ShapeDtypeStruct(like.shape, jnp.float32),))


def _places(leaves: list[Like]) -> list[tuple[int, int, int]]:
    """Where the bytes of each leaf start and end, and where its last word ends."""
    used = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    stops = itertools.accumulate((-(-n // 4) * 4 for n in used), initial=HEAD.size)
    return [(a, a + n, b) for n, (a, b) in zip(used, itertools.pairwise(stops), strict=True)]
