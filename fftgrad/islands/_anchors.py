"""Anchors in the store: the newest, one every so many rounds, and the end of what is old."""

from collections.abc import Callable

from fftgrad.islands import _anchor, _keys
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._requests import Clock, Create, Delete, List, Read, Steps, Wait, settle

ANCHORS_KEPT = 2
"""So that there is one to go back to if the newest is damaged."""


PATIENCE = 100
"""For how many deadlines no round may be closed while an island waits for an anchor."""


class LostError(RuntimeError):
    """The store has not what an island needs to go on."""


def numbers() -> Steps[list[int]]:
    """The rounds of all anchors, which ascend."""
    found = [_keys.number_of(key) for key in (yield List(_keys.ANCHORS))]
    return sorted({number for number in found if number is not None})


def newest(read: Callable[[bytes], Anchor], after: int) -> Steps[Anchor | None]:
    """The newest anchor after a round that is whole; an error if there are some, and none is."""
    problem: DamagedError | None = None
    for number in reversed((yield from numbers())):
        if number > after and (data := (yield Read(_keys.anchor(number)))) is not None:
            try:
                return read(data)
            except DamagedError as error:
                problem = error
    if problem and after < 0:
        raise ValueError(
            f"Island(store): must have an anchor that is whole, got an {problem}; take another "
            "folder, or the outer optimizer of the run."
        )
    return None


def later(
    read: Callable[[bytes], Anchor],
    after: int,
    deadline: float,
    meanwhile: Callable[[], Steps[None]] | None = None,
) -> Steps[Anchor]:
    """The newest anchor after a round, for an island that cannot go on from there by itself."""
    end = (yield Clock()) + PATIENCE * deadline
    closed: set[str] = set()
    while (found := (yield from newest(read, after))) is None:
        keys = yield List(_keys.ROUNDS, _keys.round_folder(max(0, after)))
        if now := {key for key in keys if key.endswith(_keys.MANIFEST)} - closed:
            closed |= now
            end = (yield Clock()) + PATIENCE * deadline
        if (yield Clock()) >= end:
            raise LostError(
                f"Island: must find an anchor after round {after}, because it cannot go on from "
                f"there, got none, and no round closed in {PATIENCE * deadline:.0f} s; "
                "see whether another island writes any."
            )
        if meanwhile is not None:
            yield from meanwhile()
        yield Wait(deadline / 4)
    return found


def enter(read: Callable[[bytes], Anchor], first: Anchor, deadline: float) -> Steps[Anchor]:
    """The newest anchor of a run, which begins with a first one if it has none."""
    found = yield from newest(read, -1)
    if found is None and (yield Read(_keys.manifest(0))) is None:
        found = read((yield from settle(_keys.anchor(0), _anchor.write(first))))
    if found is None:  # removed, or not listed yet
        found = yield from later(read, -1, deadline)
    return found


def keep(anchor: Anchor) -> Steps[None]:
    """What the writer of a manifest does for all, after it has obeyed it.

    Where it dies before, the next of so many rounds makes up for it. Manifests stay: they are the
    log, and where one is, nobody can close its round another time.
    """
    if anchor.round % anchor.settings.anchors:
        return
    yield Create(_keys.anchor(anchor.round), _anchor.write(anchor))
    found = yield from numbers()
    first = found[-ANCHORS_KEPT:][0] if found else 0
    if old := tuple(_keys.anchor(number) for number in found if number < first):
        yield Delete(old)
    yield from _remove_rounds(first, anchor.settings.anchors)


def _remove_rounds(before: int, every: int) -> Steps[None]:
    """The contributions of rounds from which no anchor that is kept goes on.

    It looks back as far as what was kept the last time, and as far again, should that have failed.
    """
    first = _keys.round_folder(max(0, before - (ANCHORS_KEPT + 1) * every))
    old = [
        key
        for key in (yield List(_keys.ROUNDS, first))
        if (number := _keys.number_of(key)) is not None
        and number < before
        and key != _keys.manifest(number)
    ]
    if old:
        yield Delete(tuple(old))
