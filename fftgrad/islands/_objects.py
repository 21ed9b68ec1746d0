"""Keys and bytes of the objects in a store.

    run.json                                the model and the settings
    islands/NAME/000001                     the first start (incarnation) under a name
    rounds/000000007/NAME.000001            a contribution to round 7
    rounds/000000007/manifest.json          the contributions that count; never removed
    anchors/000000007                       the common state before round 7

Islands never overwrite an object. They create it only if its key is unused.
"""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fftgrad._values import check

RUN = "run.json"
ANCHORS = "anchors/"
ROUNDS = "rounds/"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Who(NamedTuple):
    """Name of an island, and number of the start under this name."""

    island: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.island}.{self.incarnation:06}"


def check_name(name: object) -> str:
    """Refuse a name that cannot be part of a key."""
    fine = isinstance(name, str) and NAME.fullmatch(name) is not None
    check(fine, "Island(name)", "be 1 to 64 letters, digits, _ and -", repr(name), "use 'site-1'.")
    return str(name)


def round_folder(number: int) -> str:
    return f"{ROUNDS}{number:09}/"


def manifest_key(number: int) -> str:
    return f"{round_folder(number)}manifest.json"


def contribution_key(number: int, who: Who) -> str:
    return f"{round_folder(number)}{who}"


def contributors(keys: Iterable[str]) -> set[Who]:
    """Return the islands that have a contribution among the keys of a round."""
    found = (re.fullmatch(rf"rounds/\d{{9}}/({NAME.pattern})\.(\d{{6}})", key) for key in keys)
    return {Who(one[1], int(one[2])) for one in found if one}


def anchor_key(number: int) -> str:
    return f"{ANCHORS}{number:09}"


def number_of(key: str) -> int | None:
    """Return the round in the key of an anchor or of a round's object; None for other keys."""
    found = re.match(r"(?:rounds|anchors)/(\d{9})(?:/|$)", key)
    return int(found[1]) if found else None


def claims(name: str) -> str:
    return f"islands/{name}/"


def claim_key(who: Who) -> str:
    return f"{claims(who.island)}{who.incarnation:06}"


FORMAT = 3
"""Version of all objects. Raise the version with each change of their layout or meaning."""

HEAD = struct.Struct("<4sHHI")
"""Magic, format, zero, and header size in bytes. The tail is a CRC-32 of all earlier bytes."""
TAIL = struct.Struct("<I")


class DamagedError(ValueError):
    """Raised for bytes that are not an intact object of this format."""


def pack(magic: bytes, header: dict[str, Any], blobs: Sequence[bytes | memoryview]) -> bytes:
    """Return an object as bytes: the inverse of `unpack`."""
    text = json.dumps(header | {"sizes": [len(blob) for blob in blobs]}, sort_keys=True).encode()
    data = b"".join((HEAD.pack(magic, FORMAT, 0, len(text)), text, *blobs))
    return data + TAIL.pack(zlib.crc32(data))


def unpack(magic: bytes, data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Verify an object, and return its header and blobs. No code in the object can run."""
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
    """Return a JSON object as bytes, with the format and a checksum."""
    told = found | {"format": FORMAT}
    return _text(told | {"crc32": zlib.crc32(_text(told))})


def unpack_json(data: bytes) -> dict[str, Any]:
    """Verify a JSON object, and return its contents and format."""
    found = read_json(data)
    if found.pop("crc32", None) != zlib.crc32(_text(found)):
        raise DamagedError("altered")
    return found


def _text(found: dict[str, Any]) -> bytes:
    return json.dumps(found, sort_keys=True, indent=1).encode()


def read_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object without verifying the checksum."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedError("no JSON") from None
    if not isinstance(found, dict):
        raise DamagedError("no object of JSON")
    return found


def check_format(found: dict[str, Any], what: str) -> None:
    """Refuse an object of another format. Unlike damage, this always stops the island."""
    version, rule = found.get("format"), f"have format {FORMAT}"
    remedy = "use the fftgrad that wrote it, or another folder."
    check(version == FORMAT, "Island(store)", rule, f"{what} of format {version!r}", remedy)


CONTRIBUTION = b"FFTC"
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e18
"""Bounds of a weight. They keep each share positive in float32, and the sum finite."""


class Contribution(NamedTuple):
    """The compressed change of an island in a round: a header, and payloads as bytes."""

    who: Who  # the island
    round: int  # the round of the contribution
    base: int  # the round of the parameters from which the change starts
    anchor: str  # digest of the island's anchor before the round
    model: str  # digest of paths, shapes and dtypes
    weight: float  # weight in the mean, such as a number of tokens
    loss: float | None  # mean loss of the inner steps, for the status
    fault: str  # reason for a contribution without a change
    blobs: Sequence[bytes | memoryview]

    def to_bytes(self) -> bytes:
        header = self._asdict() | self.who._asdict()
        del header["who"], header["blobs"]
        return pack(CONTRIBUTION, header, self.blobs)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Contribution":
        """Parse a contribution; raise `DamagedError` if the bytes are not one."""
        header, blobs = unpack(CONTRIBUTION, data)
        who = Who(header.pop("island"), header.pop("incarnation"))
        if not LEAST_WEIGHT <= header["weight"] <= MOST_WEIGHT:
            raise DamagedError(f"of weight {header['weight']}")
        return cls(who, blobs=blobs, **header)


def digest(data: bytes) -> str:
    """Return the digest by which a manifest identifies the bytes of a contribution."""
    return hashlib.sha256(data).hexdigest()


class Entry(NamedTuple):
    """A contribution that counts."""

    island: str
    incarnation: int
    sha256: str  # digest of the bytes
    weight: float  # in the mean
    base: int  # the round of the parameters from which the change starts
    loss: float | None
    norm: float  # norm of the decoded change, computed by the writer of the manifest

    @property
    def who(self) -> Who:
        return Who(self.island, self.incarnation)


class Refusal(NamedTuple):
    """A refused contribution."""

    island: str
    incarnation: int
    reason: str

    @property
    def who(self) -> Who:
        return Who(self.island, self.incarnation)


class Manifest(NamedTuple):
    """List of the contributions that count in a round. All islands obey the list."""

    round: int
    by: Who  # the writer
    anchor: str  # digest of the writer's anchor before the round
    counted: list[Entry]  # in the order of the sum
    refused: list[Refusal]
    missed: list[str]  # expected islands that did not contribute
    expected: list[str]  # islands for which the next round waits
    waited: float  # seconds from the writer's contribution to the end of the round

    @property
    def shares(self) -> list[float]:
        """Weights of the counted contributions, divided by their sum."""
        total = sum(entry.weight for entry in self.counted)
        return [entry.weight / total for entry in self.counted]

    def to_bytes(self) -> bytes:
        found = self._asdict() | {"by": self.by._asdict()}
        found["counted"] = [entry._asdict() for entry in self.counted]
        found["refused"] = [refusal._asdict() for refusal in self.refused]
        return pack_json(found)

    @classmethod
    def from_bytes(cls, data: bytes, number: int) -> "Manifest":
        """Parse the manifest of a round; raise `DamagedError` if the bytes are not one."""
        found = unpack_json(data)
        check_format(found, f"a manifest of round {number}")
        del found["format"]
        if found["round"] != number:
            raise DamagedError(f"is that of round {found['round']}")
        found["by"] = Who(**found["by"])
        found["counted"] = [Entry(**entry) for entry in found["counted"]]
        found["refused"] = [Refusal(**refusal) for refusal in found["refused"]]
        return cls(**found)
