"""The manifest of a round: which contributions count. It is the truth, whoever wrote it."""

import json
import zlib
from typing import Any, NamedTuple

from fftgrad.islands import _frame, _keys
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import Who


class Entry(NamedTuple):
    """A contribution that counts, in the order in which all add them."""

    island: str
    incarnation: int
    sha256: str  # of its bytes
    size: int  # in bytes
    weight: float  # in the mean
    base: int  # the round from whose parameters its change is counted
    loss: float | None
    norm: float  # of what it stands for, as the writer saw it
    held: float  # norm of what its memory keeps, as it said
    traffic: dict[str, int]  # requests and bytes since it started, as it said

    @property
    def who(self) -> Who:
        """Whose it is."""
        return Who(self.island, self.incarnation)


class Refusal(NamedTuple):
    """A contribution that was there and does not count, and why."""

    island: str
    incarnation: int
    reason: str

    @property
    def who(self) -> Who:
        """Whose it is."""
        return Who(self.island, self.incarnation)


class Manifest(NamedTuple):
    """What all islands obey in a round."""

    round: int
    by: Who  # who wrote it
    anchor: str  # digest of what it held before the round
    counted: list[Entry]
    refused: list[Refusal]
    missed: list[str]  # who was expected and did not come
    expected: list[str] | None  # whom the next round waits for; None: so many as settings say
    settings: dict[str, Any] | None  # in force from the next round on, if they change
    waited: float  # seconds from the hand-in of the writer until it closed the round

    @property
    def shares(self) -> list[float]:
        """The share of each that counts in the mean; they add up to 1."""
        total = sum(entry.weight for entry in self.counted)
        return [entry.weight / total for entry in self.counted]


def write(manifest: Manifest) -> bytes:
    """The manifest in JSON."""
    found = manifest._asdict() | {"format": _frame.FORMAT, "by": manifest.by._asdict()}
    found["counted"] = [entry._asdict() for entry in manifest.counted]
    found["refused"] = [refusal._asdict() for refusal in manifest.refused]
    return _text(found | {"crc32": zlib.crc32(_text(found))})


def _text(found: dict[str, Any]) -> bytes:
    return json.dumps(found, sort_keys=True, indent=1).encode()


def read(data: bytes, number: int | None = None) -> Manifest:
    """The manifest again; its round is for the error, and may be unknown."""
    try:
        return _read(data)
    except DamagedError as error:
        key = _keys.MANIFEST if number is None else _keys.manifest(number)
        raise DamagedError(
            f"{key}: {error}; put back what it was, or go on in another folder."
        ) from None


def _read(data: bytes) -> Manifest:
    found = _frame.read_json(data)
    total, version = found.pop("crc32", None), found.get("format")
    if version != _frame.FORMAT:
        raise DamagedError(
            f"manifest: must be of format {_frame.FORMAT}, got {version!r}; take the fftgrad that "
            "wrote the store."
        )
    if total != zlib.crc32(_text(found)):
        raise DamagedError("altered")
    found.pop("format")
    try:
        found["by"] = Who(**found["by"])
        found["counted"] = [Entry(**entry) for entry in found["counted"]]
        found["refused"] = [Refusal(**refusal) for refusal in found["refused"]]
        manifest = Manifest(**found)
        if type(manifest.round) is not int or not all(share > 0 for share in manifest.shares):
            raise ValueError
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise DamagedError("manifest: must name what counts, got something else.") from None
    return manifest
