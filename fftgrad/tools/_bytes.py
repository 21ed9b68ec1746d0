"""Count the bytes of a step from shapes alone, and serialize payloads for files and stores."""

import itertools
import math
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import Codec, Exchange, Like, Payload, PyTree
from fftgrad._values import check_count, check_kind, check_type
from fftgrad.codecs._chain import payload_spec
from fftgrad.exchanges import _bucketing
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._bucketing import Bucket, Bucketing
from fftgrad.exchanges._recipe import Recipe, recipe_of
from fftgrad.ops import _wire
from fftgrad.tools._compress import as_vector, check_payload

MAGIC = b"FFTG"
VERSION = 1
"""Version of head and tail. The configuration covers the version of the payload's encoding."""

HEAD = struct.Struct("<4sHHIQ")
"""Magic, version, zero, configuration checksum, number of bytes of the payload."""

TAIL = struct.Struct("<I")


def wire_bytes(
    part: Codec | Exchange | Recipe, like: PyTree, bucketing: Bucketing | None = None
) -> int:
    """Function: compute the exact number of bytes that a worker passes to the collectives per step.

    The number follows from shapes: a header of 4 bytes, then main and side, each rounded up to a
    multiple of 4 bytes. `fg.audit` checks it in a compiled program.

    Args:
      part: a codec, an exchange, or a method, such as `fg.methods.top_k(0.01)`.
      like: the gradient: an array, a `jax.ShapeDtypeStruct`, or a pytree of them.
      bucketing: as for `compressed_pmean`.

    Raises:
      ValueError: if the bytes depend on the step (`Scheduled`). Pass `exchange.at(step)`.

    Example:
      >>> x = jax.ShapeDtypeStruct((1_000_000,), "float32")
      >>> fg.wire_bytes(fg.AllReduce(), x)
      4000000
      >>> fg.wire_bytes(fg.chain(fg.TopK(fraction=0.01), fg.LogQuantizer(bits=6)), x)
      18216
    """
    exchange, buckets = _buckets("wire_bytes", part, like, bucketing)
    return sum(map(exchange.wire_bytes, buckets))


def link_bytes(
    part: Codec | Exchange | Recipe, like: PyTree, workers: int, bucketing: Bucketing | None = None
) -> float:
    """Function: compute the bytes that each of w workers sends over its link per step.

    The workers form a ring. An all-gather sends each buffer w - 1 times, an all-reduce
    2 (w - 1) / w times, an all-to-all (w - 1) / w times. It traces the exchange, without devices.

    Args:
      part: as for `fg.wire_bytes`.
      like: the gradient, as for `fg.wire_bytes`.
      workers: w, the total number of workers. For `Hierarchical`, only slow links are counted.
      bucketing: as for `compressed_pmean`.

    Raises:
      ValueError: as `fg.wire_bytes`; or if the exchange is for another number of workers.

    Example:
      >>> x = jax.ShapeDtypeStruct((1_000_000,), "float32")
      >>> [fg.link_bytes(part, x, workers=4) for part in (fg.AllReduce(), fg.Sign())]
      [6000000.0, 375024.0]
    """
    check_count("link_bytes(workers)", workers, "count all.")
    exchange, buckets = _buckets("link_bytes", part, like, bucketing)
    return sum(exchange.link_bytes(bucket, workers) for bucket in buckets)


def _buckets(
    owner: str, part: Codec | Exchange | Recipe, like: PyTree, bucketing: Bucketing | None
) -> tuple[Exchange, list[Bucket]]:
    """Return the exchange, which is `AllGather` for a codec, and the shapes of its buckets."""
    swapped, remedy = isinstance(like, Codec | Exchange | Recipe), f"call {owner}(part, like)."
    check_type(not swapped, f"{owner}(like)", "be a gradient", like, remedy)
    exchange = AllGather(part) if isinstance(part, Codec) else part
    if not isinstance(exchange, Recipe):
        remedy = "pass a codec, an exchange or a method, such as PowerSgd(4)."
        check_kind(f"{owner}(part)", exchange, Exchange, remedy)
    _bucketing.check_tree(owner, "like", like)
    recipe = recipe_of(owner, exchange, bucketing=bucketing)
    layout = recipe.bucketing.for_exchange(recipe.exchange)
    return recipe.exchange, _bucketing.bucket_likes(like, layout)


def to_bytes(payload: Payload, codec: Codec, like: Like) -> bytes:
    """Function: serialize a payload, for files, object storage and your own transports.

    docs/wire-format.md describes the format. Store the codec, the shape and, for a codec with
    random numbers, the step too: the bytes contain only a checksum of codec and shape.

    Args:
      payload: the result of `fg.compress`. Call it outside of `jax.jit`.
      codec: the codec that made the payload.
      like: an array or `jax.ShapeDtypeStruct` with the shape of the compressed array.

    Returns:
      `fg.wire_bytes(codec, like)` + 20 bytes, for `fg.tools.from_bytes`.

    Example:
      >>> codec, x = fg.TopK(k=1), jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> data = fg.tools.to_bytes(fg.compress(codec, x), codec, x)
      >>> len(data), data[:4]
      (32, b'FFTG')
    """
    payload = jax.tree.map(jnp.asarray, payload)
    check_payload("to_bytes(payload)", codec, payload, as_vector("to_bytes(like)", like))
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
    words = b"".join(leaf + bytes(-len(leaf) % 4) for leaf in leaves)
    data = HEAD.pack(MAGIC, VERSION, 0, _configuration(codec, like), len(words)) + words
    return data + TAIL.pack(zlib.crc32(data))


def from_bytes(data: bytes | bytearray | memoryview, codec: Codec, like: Like) -> Payload:
    """Function: read a payload, bit for bit, from the bytes of `to_bytes`.

    Untrusted bytes are safe: the size is checked first, no code is executed, and invalid bytes take
    no more memory than valid ones. The checksum detects damage, but does not authenticate.

    Args:
      data: the result of `fg.tools.to_bytes`.
      codec: the codec that made the payload.
      like: an array or `jax.ShapeDtypeStruct` with the shape of the compressed array.

    Raises:
      ValueError: if the bytes were altered, or were made by another codec, shape or version.

    Example:
      >>> codec, x = fg.TopK(k=1), jnp.array([0.0, -3.0, 1.0, 2.0])
      >>> data = fg.tools.to_bytes(fg.compress(codec, x), codec, x)
      >>> fg.decompress(codec, fg.tools.from_bytes(data, codec, x), like=x)
      Array([ 0., -3.,  0.,  0.], dtype=float32)
    """
    check_kind("from_bytes(codec)", codec, Codec, "pass a value such as TopK(k=9).")
    spec = payload_spec(codec, as_vector("from_bytes(like)", like))
    view = memoryview(data).cast("B")
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
    """Describe the first fault of the bytes; "" if there is none."""
    size, made_by = _wire.nbytes(spec) - _wire.nbytes(()), f"{codec!r} and {tuple(like.shape)}"
    wanted = HEAD.size + size + TAIL.size
    if view.nbytes != wanted:
        return f"must have {wanted} bytes for {made_by}, got {view.nbytes}; fetch it anew."
    head = HEAD.pack(MAGIC, VERSION, 0, _configuration(codec, like), size)
    start = view[: HEAD.size].tobytes()
    if start != head:
        return (
            f"must start with {head.hex()} for {made_by}, got {start.hex()}; "
            "pass the codec and shape it was made by, and use that version of fftgrad."
        )
    (checksum,) = TAIL.unpack_from(view, wanted - TAIL.size)
    found = zlib.crc32(view[: -TAIL.size])
    if checksum != found:
        return f"must end with its checksum, {found:#010x}, got {checksum:#010x}; fetch it anew."
    if any(any(view[end:filled]) for _, end, filled in _places(jax.tree.leaves(spec))):
        return "must have zeros where a word has no value, got others; fetch it anew."
    return ""


def _configuration(codec: Codec, like: Like) -> int:
    # The checksum must not depend on the array's dtype, because `compress` casts to float32.
    return _wire.configuration(codec, jax.ShapeDtypeStruct(like.shape, jnp.float32))


def _places(leaves: list[Like]) -> list[tuple[int, int, int]]:
    """Return the start and end of each leaf's bytes, and the end of the padding after them."""
    used = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    stops = itertools.accumulate((-(-n // 4) * 4 for n in used), initial=HEAD.size)
    return [(a, a + n, b) for n, (a, b) in zip(used, itertools.pairwise(stops), strict=True)]
