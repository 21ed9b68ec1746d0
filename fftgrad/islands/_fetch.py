"""The contributions that a manifest names, from the store."""

from collections.abc import Callable

from fftgrad.islands import _anchors, _contribution, _keys
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._manifest import Entry
from fftgrad.islands._requests import Clock, Read, Steps, Wait


def fetch(
    number: int,
    entry: Entry,
    mine: bytes | DamagedError | None,
    most: int,
    deadline: float,
    meanwhile: Callable[[], Steps[None]],
) -> Steps[bytes | None]:
    """The bytes that a manifest names, `most` at most; None if the store has them no more.

    `mine` are those that the island has itself, which may be others.
    """
    end = (yield Clock()) + deadline
    data = mine
    while True:
        if not _is_named(data, entry):
            yield from meanwhile()
            try:
                data = yield Read(_keys.contribution(number, entry.who), most)
            except DamagedError as error:
                data = error
        if isinstance(data, bytes) and _is_named(data, entry):
            return data
        newer = yield from _anchors.numbers()
        now = yield Clock()
        if (newer and newer[-1] > number) or now >= end:
            return None
        yield Wait(max(0.01, min(deadline / 10, end - now)))


def _is_named(data: bytes | DamagedError | None, entry: Entry) -> bool:
    return isinstance(data, bytes) and _contribution.digest(data) == entry.sha256
