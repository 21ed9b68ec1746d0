"""The objects of a store as bytes, with checksums: contributions, manifests, and their frame."""

import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from fftgrad.islands._keys import Who

FORMAT = 3
"""The number of the layout and meaning of all objects. A change of either gets another number."""

HEAD = struct.Struct("<4sHHI")
"""Magic, format, zero, bytes of the header. A CRC-32 of all that stands before it is the tail."""
TAIL = struct.Struct("<I")


class DamagedError(ValueError):
    """Bytes that are no object of this format."""


def pack(magic: bytes, header: dict[str, Any], blobs: Sequence[bytes | memoryview]) -> bytes:
    """The bytes of an object, of which `unpack` makes header and blobs again."""
    text = json.dumps(header | {"sizes": [len(blob) for blob in blobs]}, sort_keys=True).encode()
    data = b"".join((HEAD.pack(magic, FORMAT, 0, len(text)), text, *blobs))
    return data + TAIL.pack(zlib.crc32(data))


def unpack(magic: bytes, data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Header and blobs; nothing is executed."""
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
    blobs: list[memoryview] = []
    for size in header.pop("sizes"):
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


CONTRIBUTION = b"FFTC"
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e18
"""Bounds of a weight, so that every share is a positive float32, and the sum of all is finite."""


class Contribution(NamedTuple):
    """The change that an island hands in to a round: a header, and payloads as bytes."""

    who: Who  # its island
    round: int  # the round that it is for
    base: int  # the round from whose parameters the change is counted
    anchor: str  # digest of the anchor that the island held before the round
    model: str  # digest of paths, shapes and dtypes
    weight: float  # in the mean, such as tokens
    loss: float | None  # mean loss of the inner steps, for people
    fault: str  # why its island has nothing to hand in, though it is there
    blobs: Sequence[bytes | memoryview]

    def to_bytes(self) -> bytes:
        """The contribution as an object."""
        header = self._asdict() | self.who._asdict()
        del header["who"], header["blobs"]
        return pack(CONTRIBUTION, header, self.blobs)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Contribution":
        """The contribution of an object; a `DamagedError` if it is none."""
        header, blobs = unpack(CONTRIBUTION, data)
        who = Who(header.pop("island"), header.pop("incarnation"))
        if not LEAST_WEIGHT <= header["weight"] <= MOST_WEIGHT:
            raise DamagedError(f"of weight {header['weight']}")
        return cls(who, blobs=blobs, **header)


def digest(data: bytes) -> str:
    """The digest by which a manifest names the bytes of a contribution."""
    return hashlib.sha256(data).hexdigest()


class Entry(NamedTuple):
    """A contribution that counts."""

    island: str
    incarnation: int
    sha256: str  # of its bytes
    weight: float  # in the mean
    base: int  # the round from whose parameters its change is counted
    loss: float | None
    norm: float  # of the decoded change, as the writer of the manifest saw it

    @property
    def who(self) -> Who:
        """Its island."""
        return Who(self.island, self.incarnation)


class Refusal(NamedTuple):
    """A contribution that came and does not count, and why."""

    island: str
    incarnation: int
    reason: str

    @property
    def who(self) -> Who:
        """Its island."""
        return Who(self.island, self.incarnation)


class Manifest(NamedTuple):
    """The decision which contributions count in a round. All obey it, whoever wrote it."""

    round: int
    by: Who  # its writer
    anchor: str  # digest of the anchor that the writer held before the round
    counted: list[Entry]  # in the order in which all add them
    refused: list[Refusal]
    missed: list[str]  # islands that were expected and did not come
    expected: list[str]  # islands for which the next round waits
    waited: float  # seconds from the hand-in of the writer until it closed the round

    @property
    def shares(self) -> list[float]:
        """The share of each contribution in the mean; they add up to 1."""
        total = sum(entry.weight for entry in self.counted)
        return [entry.weight / total for entry in self.counted]

    def to_bytes(self) -> bytes:
        """The manifest as an object of JSON."""
        found = self._asdict() | {"by": self.by._asdict()}
        found["counted"] = [entry._asdict() for entry in self.counted]
        found["refused"] = [refusal._asdict() for refusal in self.refused]
        return pack_json(found)

    @classmethod
    def from_bytes(cls, data: bytes, number: int) -> "Manifest":
        """The manifest of a round, of an object; a `DamagedError` if it is none."""
        found = unpack_json(data)
        if (version := found.pop("format", None)) != FORMAT:
            raise ValueError(  # no damage, or another manifest would take its place
                f"Island(store): must be of format {FORMAT}, got a manifest of round {number} of "
                f"format {version!r}; take the fftgrad that wrote it."
            )
        if found["round"] != number:
            raise DamagedError(f"is that of round {found['round']}")
        found["by"] = Who(**found["by"])
        found["counted"] = [Entry(**entry) for entry in found["counted"]]
        found["refused"] = [Refusal(**refusal) for refusal in found["refused"]]
        return cls(**found)
