"""Objects of several arrays as bytes: a header in JSON, what it speaks of, and a checksum."""

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

FORMAT = 1
"""Of all objects of the store. Another layout, or another meaning, gets another number."""

HEAD = struct.Struct("<4sHHI")
"""Magic, format, zero, bytes of the header."""

TAIL = struct.Struct("<I")


MOST_PARTS = 100_000
"""Of an object; each takes memory, be it empty."""


class DamagedError(ValueError):
    """Bytes that are not those of an object of this format."""


def pack(magic: bytes, header: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    """The bytes of an object, of which `unpack` makes header and blobs again."""
    text = json.dumps(header | {"sizes": [len(blob) for blob in blobs]}, sort_keys=True).encode()
    data = b"".join((HEAD.pack(magic, FORMAT, 0, len(text)), text, *blobs))
    return data + TAIL.pack(zlib.crc32(data))


def unpack(magic: bytes, data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Header and blobs; nothing is executed, and no more memory is taken than the bytes have."""
    view = memoryview(data)
    if len(view) < HEAD.size + TAIL.size:
        raise DamagedError("cut off")
    found, version, zero, length = HEAD.unpack_from(view)
    if found != magic:
        raise DamagedError(f"no object that starts with {magic!r}")
    if (version, zero) != (FORMAT, 0):
        raise DamagedError(f"of format {version}, this fftgrad reads {FORMAT}")
    if TAIL.unpack_from(view, len(view) - TAIL.size)[0] != zlib.crc32(view[: -TAIL.size]):
        raise DamagedError("altered, or cut off")
    text, rest = view[HEAD.size : HEAD.size + length], view[HEAD.size + length : -TAIL.size]
    header = read_json(bytes(text))
    sizes = header.pop("sizes", None)
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise DamagedError("without the sizes of its parts")
    if len(sizes) > MOST_PARTS:
        raise DamagedError(f"of {len(sizes)} parts, more than {MOST_PARTS}")
    if sum(sizes) != len(rest):
        raise DamagedError("of other sizes than it says")
    blobs: list[memoryview] = []
    for size in sizes:
        blobs.append(rest[:size])
        rest = rest[size:]
    return header, blobs


def read_json(data: bytes) -> dict[str, Any]:
    """An object of JSON, whatever the bytes are."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedError("no JSON") from None
    if not isinstance(found, dict):
        raise DamagedError("no object of JSON")
    return found
