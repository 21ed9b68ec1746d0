"""What an island hands in to a round."""

import hashlib
from typing import Any, NamedTuple

from fftgrad.islands import _frame
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._keys import NAME, Who
from fftgrad.islands._settings import MOST_STEPS

MAGIC = b"FFTC"

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e18
"""So that every share is a positive float32, and the sum of all is finite."""


class Contribution(NamedTuple):
    """Its header, and its payloads by `fg.tools.to_bytes`."""

    who: Who  # whose it is
    round: int  # the round that it is for
    base: int  # the round from whose parameters the change is counted
    anchor: str  # digest of what the island held before the round
    model: str  # digest of paths, shapes and dtypes
    weight: float  # in the mean, such as tokens
    loss: float | None  # mean loss of the inner steps, for people
    held: float  # norm of what the island's memory keeps after it
    fault: str  # why its sender hands in nothing; it says that it is there
    blobs: list[memoryview]


def check_weight(weight: Any) -> float:
    """Refuses the weight of a step of which a round could not have as many as it may have."""
    weight, most = float(weight), MOST_WEIGHT / MOST_STEPS
    if not LEAST_WEIGHT <= weight <= most:
        raise ValueError(
            f"Island.step(weight): must be {LEAST_WEIGHT:g} to {most:g}, got {weight}; pass the "
            "tokens of the step."
        )
    return weight


PLAIN = {
    "round": int,
    "base": int,
    "anchor": str,
    "model": str,
    "weight": float,
    "held": float,
    "fault": str,
}
"""What a header has besides, and of which type."""


def write(contribution: Contribution, blobs: list[bytes]) -> bytes:
    """The bytes of a contribution."""
    header = {name: getattr(contribution, name) for name in (*PLAIN, "loss")}
    header |= contribution.who._asdict()
    return _frame.pack(MAGIC, header, blobs)


def read(data: bytes, parts: int) -> Contribution:
    """The contribution again, of so many parts; what is wrong with others is a `DamagedError`."""
    header, blobs = _frame.unpack(MAGIC, data, parts)
    if set(header) != {*PLAIN, "loss", "island", "incarnation"}:
        raise DamagedError("with another header")
    for name, kind in PLAIN.items():
        if type(header[name]) is not kind:
            raise DamagedError(f"with {name} {header[name]!r}")
    name, incarnation = header.pop("island"), header.pop("incarnation")
    if not (isinstance(name, str) and NAME.fullmatch(name) and type(incarnation) is int):
        raise DamagedError("of no island")
    if not LEAST_WEIGHT <= header["weight"] <= MOST_WEIGHT:
        raise DamagedError(f"of weight {header['weight']}")
    if type(header["loss"]) not in (float, type(None)):
        raise DamagedError(f"with loss {header['loss']!r}")
    return Contribution(Who(name, incarnation), blobs=blobs, **header)


def digest(data: bytes) -> str:
    """By which a manifest names the bytes of a contribution."""
    return hashlib.sha256(data).hexdigest()
