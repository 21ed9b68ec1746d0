"""Objects as bytes, with checksums: JSON alone, or a header in JSON and arrays."""

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

FORMAT = 2
"""Of all objects of the store. Another layout, or another meaning, gets another number."""

HEAD = struct.Struct("<4sHHI")
"""Magic, format, zero, bytes of the header."""

TAIL = struct.Struct("<I")

MOST_TEXT = 1 << 24
"""Bytes of an object that is JSON alone."""

MOST_HEADER, OF_A_PART = 1 << 20, 200
"""Bytes of a header, and what each part of the object adds to them."""


class DamagedError(ValueError):
    """Bytes that are not those of an object of this format."""


class TooLargeError(DamagedError):
    """An object that is not read, because it has more bytes than any that belongs there."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"too large: {size:,} bytes, at most {most:,}")


def most_bytes(sizes: Sequence[int]) -> int:
    """What an object may have whose parts have so many bytes."""
    return HEAD.size + _most_header(len(sizes)) + sum(sizes) + TAIL.size


def _most_header(parts: int) -> int:
    return MOST_HEADER + OF_A_PART * parts


def pack(magic: bytes, header: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    """The bytes of an object, of which `unpack` makes header and blobs again."""
    text = json.dumps(header | {"sizes": [len(blob) for blob in blobs]}, sort_keys=True).encode()
    data = b"".join((HEAD.pack(magic, FORMAT, 0, len(text)), text, *blobs))
    return data + TAIL.pack(zlib.crc32(data))


def unpack(magic: bytes, data: bytes, parts: int) -> tuple[dict[str, Any], list[memoryview]]:
    """Header and blobs, so many at most; nothing is executed, and little memory is taken."""
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
    if length > _most_header(parts):
        raise DamagedError(f"with a header of {length:,} bytes, at most {_most_header(parts):,}")
    text, rest = view[HEAD.size : HEAD.size + length], view[HEAD.size + length : -TAIL.size]
    header = read_json(bytes(text))
    sizes = header.pop("sizes", None)
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise DamagedError("without the sizes of its parts")
    if len(sizes) > parts:
        raise DamagedError(f"of {len(sizes)} parts, at most {parts}")
    if sum(sizes) != len(rest):
        raise DamagedError("of other sizes than it says")
    blobs: list[memoryview] = []
    for size in sizes:
        blobs.append(rest[:size])
        rest = rest[size:]
    return header, blobs


def pack_json(found: dict[str, Any]) -> bytes:
    """An object of JSON with its format and checksum."""
    told = found | {"format": FORMAT}
    return _text(told | {"crc32": zlib.crc32(_text(told))})


def unpack_json(data: bytes) -> dict[str, Any]:
    """What `pack_json` was given, and its format."""
    found = read_json(data)
    if found.pop("crc32", None) != zlib.crc32(_text(found)):
        raise DamagedError("altered")
    return found


def _text(found: dict[str, Any]) -> bytes:
    return json.dumps(found, sort_keys=True, indent=1).encode()


def read_json(data: bytes) -> dict[str, Any]:
    """An object of JSON, whatever the bytes are."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedError("no JSON") from None
    if not isinstance(found, dict):
        raise DamagedError("no object of JSON")
    return found
