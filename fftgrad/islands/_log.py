"""Which manifest decides a round: the first that is whole.

A second one, manifest.1.json, is only written where the first is damaged and nobody is known to
have obeyed it, and so on. So whoever reads the log finds the same, and no damage ends a run.
"""

import itertools
from typing import NamedTuple

from fftgrad.islands import _frame, _keys, _manifest
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._manifest import Manifest
from fftgrad.islands._requests import List, Read, Steps


class Decision(NamedTuple):
    """What the log says of a round."""

    manifest: Manifest | None  # None: nothing, and the round is open
    copy: int  # which of its manifests that is, or the next will be
    damage: str  # what is wrong with the one before; empty: there is none


def decision(number: int) -> Steps[Decision]:
    """What decides a round."""
    damage = ""
    for copy in itertools.count():
        key = _keys.manifest(number, copy)
        try:
            data = yield Read(key, _frame.MOST_TEXT)
            if data is None:
                return Decision(None, copy, damage)
            return Decision(_manifest.read(data, number), copy, damage)
        except DamagedError as error:
            damage = f"{key} is damaged ({error})"
    raise AssertionError


def is_passed(number: int) -> Steps[bool]:
    """Whether somebody obeyed a manifest of a round, as far as what came later tells."""
    for folder, after in ((_keys.ANCHORS, ""), (_keys.ROUNDS, _keys.round_folder(number + 1))):
        for key in (yield List(folder, after)):
            if (_keys.number_of(key) or 0) > number and not _keys.leaver(key):
                return True
    return False
