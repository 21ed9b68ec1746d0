"""The contributions that a manifest names, from the store."""

from fftgrad.islands import _anchors, _contribution, _keys
from fftgrad.islands._manifest import Entry
from fftgrad.islands._requests import Clock, Read, Steps, Wait


def fetch(number: int, entry: Entry, mine: bytes | None, deadline: float) -> Steps[bytes | None]:
    """The bytes that a manifest names; None if the store has them no more.

    `mine` are those that the island has itself, which may be others.
    """
    end = (yield Clock()) + deadline
    data = mine
    while True:
        if data is None or _contribution.digest(data) != entry.sha256:
            data = yield Read(_keys.contribution(number, entry.who))
        if data is not None and _contribution.digest(data) == entry.sha256:
            return data
        newer = yield from _anchors.numbers()
        now = yield Clock()
        if (newer and newer[-1] > number) or now >= end:
            return None
        yield Wait(max(0.01, min(deadline / 10, end - now)))
