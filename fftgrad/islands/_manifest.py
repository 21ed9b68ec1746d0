"""The manifest of a round: which contributions count. It is the truth, whoever wrote it."""

from typing import NamedTuple

from fftgrad.islands import _frame
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import Who


class Entry(NamedTuple):
    """A contribution that counts, in the order in which all add them."""

    island: str
    incarnation: int
    sha256: str  # of its bytes
    weight: float  # in the mean
    base: int  # the round from whose parameters its change is counted
    loss: float | None
    norm: float  # of what it stands for, as the writer saw it
    held: float  # norm of what its memory keeps, as it said

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
    expected: list[str]  # whom the next round waits for
    waited: float  # seconds from the hand-in of the writer until it closed the round

    @property
    def shares(self) -> list[float]:
        """The share of each that counts in the mean; they add up to 1."""
        total = sum(entry.weight for entry in self.counted)
        return [entry.weight / total for entry in self.counted]


def write(manifest: Manifest) -> bytes:
    """The manifest in JSON."""
    found = manifest._asdict() | {"by": manifest.by._asdict()}
    found["counted"] = [entry._asdict() for entry in manifest.counted]
    found["refused"] = [refusal._asdict() for refusal in manifest.refused]
    return _frame.pack_json(found)


def read(data: bytes, number: int) -> Manifest:
    """The manifest of a round again."""
    found = _frame.unpack_json(data)
    if (version := found.pop("format", None)) != _frame.FORMAT:
        raise ValueError(  # and no damage, which another manifest would take the place of
            f"Island(store): must be of format {_frame.FORMAT}, got a manifest of round {number} "
            f"of format {version!r}; take the fftgrad that wrote it."
        )
    try:
        found["by"] = Who(**found["by"])
        found["counted"] = [Entry(**entry) for entry in found["counted"]]
        found["refused"] = [Refusal(**refusal) for refusal in found["refused"]]
        manifest = Manifest(**found)
        if not all(share > 0 for share in manifest.shares):
            raise ValueError
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise DamagedError("does not say what counts") from None
    if manifest.round != number:
        raise DamagedError(f"is that of round {manifest.round}")
    return manifest
