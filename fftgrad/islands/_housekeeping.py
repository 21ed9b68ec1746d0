"""Anchors every so many rounds, and the removal of what nobody needs any more."""

from fftgrad.islands import _anchor, _keys
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._requests import Create, Delete, List, Steps

ANCHORS_KEPT = 2
"""So that there is one to go back to if the newest is damaged."""


def keep(anchor: Anchor) -> Steps[None]:
    """What the writer of a manifest does for all, after it has obeyed it.

    Where it dies before, the next of so many rounds makes up for it. Manifests stay: they are the
    log, and where one is, nobody can close its round another time.
    """
    if anchor.round % anchor.settings.anchors:
        return
    yield Create(_keys.anchor(anchor.round), _anchor.write(anchor))
    numbers = [_keys.number_of(key) for key in (yield List(_keys.ANCHORS))]
    kept = sorted({number for number in numbers if number is not None})[-ANCHORS_KEPT:]
    if old := tuple(_keys.anchor(n) for n in numbers if n is not None and n < kept[0]):
        yield Delete(old)
    yield from _remove_rounds(kept[0], anchor.settings.anchors)


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
