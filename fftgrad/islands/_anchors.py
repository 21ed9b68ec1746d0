"""Anchors in the store: the newest, one every so many rounds, and the end of what is old."""

from collections.abc import Callable
from typing import NamedTuple

from fftgrad.islands import _anchor, _keys, _log
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._requests import Clock, Create, Delete, List, Read, Steps, Wait, settle

ANCHORS_KEPT = 2
"""So that there is one to go back to if the newest is damaged."""


PATIENCE = 100
"""For how many deadlines nothing may come to a store before that is told."""


class Reader(NamedTuple):
    """How an island reads anchors."""

    read: Callable[[bytes], Anchor]
    most: int  # bytes of one


def numbers() -> Steps[list[int]]:
    """The rounds of all anchors, which ascend."""
    found = [_keys.number_of(key) for key in (yield List(_keys.ANCHORS))]
    return sorted({number for number in found if number is not None})


def newest(reader: Reader, after: int = -1) -> Steps[Anchor | None]:
    """The newest anchor after a round that is whole."""
    found, _ = yield from _newest(reader, after)
    return found


def _newest(reader: Reader, after: int) -> Steps[tuple[Anchor | None, DamagedError | None]]:
    """And what is wrong with the last that is not."""
    problem: DamagedError | None = None
    for number in reversed((yield from numbers())):
        if number <= after:
            break
        try:
            if (data := (yield Read(_keys.anchor(number), reader.most))) is not None:
                return reader.read(data), problem
        except DamagedError as error:
            problem = error
    return None, problem


def later(
    reader: Reader,
    after: int,
    deadline: float,
    meanwhile: Callable[[], Steps[None]],
    tell: Callable[[str], None],
    gives_up: bool = False,
) -> Steps[Anchor | None]:
    """The newest anchor after a round, for an island that cannot go on from there by itself.

    However long rounds take, it waits, and tells if nothing comes to the store. Where it `gives_up`
    it then has none.
    """
    seen: set[str] = set()
    end = (yield Clock()) + PATIENCE * deadline
    while (found := (yield from newest(reader, after))) is None:
        now = set((yield List(_keys.ROUNDS, _keys.round_folder(max(0, after))))) - seen
        if now:
            seen |= now
            end = (yield Clock()) + PATIENCE * deadline
        elif (yield Clock()) >= end:
            if gives_up:
                return None
            tell(
                f"waits for an anchor after round {after}, because it cannot go on from there, and "
                f"nothing came to the store in {PATIENCE * deadline:.0f} s; see whether another "
                "island lives"
            )
        yield from meanwhile()
        yield Wait(deadline / 4)
    return found


def enter(
    reader: Reader, first: Anchor, deadline: float, tell: Callable[[str], None]
) -> Steps[Anchor]:
    """The newest anchor of a run, which begins with a first one if it has none."""
    found, problem = yield from _newest(reader, -1)
    if found is None and problem is None:
        log = yield from _log.decision(0)
        if log.manifest is None and not log.damage:
            data = yield from settle(_keys.anchor(0), _anchor.write(first), reader.most)
            found = reader.read(data)
        else:  # removed, or not listed yet
            found = yield from later(reader, -1, deadline, _nothing, tell)
    if found is None:
        raise ValueError(
            f"Island(store): must have an anchor that is whole, got one that is not, or does "
            f"not fit ({problem}); take another folder, or the outer optimizer of the run."
        )
    return found


def _nothing() -> Steps[None]:
    yield from ()


def keep(anchor: Anchor, every: int) -> Steps[None]:
    """What the writer of a manifest does for all, after it has obeyed it.

    Where it dies before, the next of so many rounds makes up for it. Manifests stay: they are the
    log, and where one is, nobody can close its round another time.
    """
    if anchor.round % every:
        return
    yield Create(_keys.anchor(anchor.round), _anchor.write(anchor))
    found = yield from numbers()
    first = found[-ANCHORS_KEPT:][0] if found else 0
    if old := tuple(_keys.anchor(number) for number in found if number < first):
        yield Delete(old)
    yield from _remove_rounds(first, every)


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
        and not _keys.is_manifest(key)
    ]
    if old:
        yield Delete(tuple(old))
