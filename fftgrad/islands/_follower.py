"""How an island comes to what all hold: it obeys the log, or takes an anchor of who has.

What all hold before round r + 1 is a pure function of what they hold before round r, of the
manifest of r, and of the contributions that it names; so all have the same bits, whoever computes
them, and whenever.
"""

import math
import warnings
from typing import Any

from fftgrad.islands import _anchor, _anchors, _claim, _contribution, _frame, _log, _run
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._anchors import Reader
from fftgrad.islands._fetch import fetch
from fftgrad.islands._gathering import Gathering
from fftgrad.islands._keys import Who
from fftgrad.islands._ledger import Ledger
from fftgrad.islands._manifest import Manifest
from fftgrad.islands._model import Model
from fftgrad.islands._programs import Outer, Programs
from fftgrad.islands._requests import Clock, Steps
from fftgrad.islands._settings import Settings


class Follower:
    """What an island has of the run, and how it goes on with the others.

    Every method that is a generator may be dropped at any request, or be stopped by an error of the
    store, and called again.
    """

    def __init__(self, name: str, model: Model, outer: Outer, ledger: Ledger) -> None:
        self.who = Who(name, 0)
        self.run = b""  # the object of the store that says which run it is
        self.model, self.outer, self.ledger = model, outer, ledger
        self.trouble = ""  # why nothing of it counts, or what is wrong with the store
        self.settings: Settings
        self.answered: set[int] = set()
        self.gathering: Gathering
        self.programs: Programs
        self.own = b""  # its last contribution
        self.damage = ""  # of the store, in which it goes on
        self._reader = Reader(self._read_anchor, _anchor.most_bytes(model, outer))
        self._told = -math.inf  # when it last looked for others who claim the name
        self._reopened = -1  # a round whose manifest is damaged, and which nobody alive obeyed

    @property
    def anchor(self) -> Anchor:
        """What all hold before the open round."""
        return self.gathering.anchor

    @anchor.setter
    def anchor(self, anchor: Anchor) -> None:
        self.gathering.anchor = anchor

    def answer(self) -> Steps[None]:
        """Tells others who claim the name that it is taken; an error if one has it already."""
        now = yield Clock()
        is_due = now - self._told >= self.settings.deadline / 4
        if is_due and self.who.incarnation:
            yield from _claim.answer(self.who, self.answered, lambda: _run.stay(self.run))
            self._told = now

    def tell(self, trouble: str) -> None:
        """Says what is wrong; of a start, to the program that waits for it."""
        self.trouble = trouble
        if not self.who.incarnation:
            warnings.warn(f"Island: {trouble}.", UserWarning, stacklevel=2)

    def catch_up(self) -> Steps[None]:
        """Obeys all manifests that there are."""
        while True:
            found = yield from _log.decision(self.anchor.round)
            if found.manifest is not None:
                yield from self.obey(found.manifest)
            elif not (yield from self.is_passed(found.damage)):
                return

    def obey(self, manifest: Manifest) -> Steps[None]:
        """Takes the outer step of a round. It ends either before it or after it."""
        self.ledger.resolve(manifest, self.who)
        before = self.anchor
        if manifest.round != before.round:
            return
        if manifest.anchor != before.digest:
            yield from self._take_newer()
            return
        sent: list[Any] = []
        for entry in manifest.counted:
            yield from self.answer()
            mine = self.own if entry.who == self.who else self.gathering.found.get(entry.who)
            most, deadline = self.gathering.most, self.settings.deadline
            data = yield from fetch(manifest.round, entry, mine, most, deadline, self.answer)
            if data is None:
                yield from self._take_newer()
                return
            blobs = _contribution.read(data, len(self.programs.sizes)).blobs
            sent.append(self.programs.from_bytes(blobs))
        self.take(_anchor.after(before, manifest, sent, self.programs, self.outer, self.settings))
        self.gathering.named = {one.who for one in (*manifest.counted, *manifest.refused)}
        if manifest.by == self.who:
            yield from _anchors.keep(self.anchor, self.settings.anchors)

    def is_passed(self, damage: str) -> Steps[bool]:
        """Whether others have obeyed a manifest that is damaged by now; then takes their anchor."""
        number = self.anchor.round
        if not damage or number == self._reopened:
            return False
        self.damage = damage
        self.tell(damage)
        if not (yield from _log.is_passed(number)):
            return False
        yield from self._take_newer(gives_up=True)
        if self.anchor.round == number:
            self._reopened = number
        return self.anchor.round > number

    def take(self, anchor: Anchor) -> None:
        """Goes on from an anchor."""
        most = _frame.most_bytes(self.programs.sizes)
        before = getattr(self, "gathering", None)
        self.gathering = Gathering(anchor, self.settings, most)
        if before is not None:
            self.gathering.hand_in(before.handed, before.trained)

    def compute_again(self) -> Steps[None]:
        """What all hold, from the newest anchor that is whole, and the manifests since."""
        found = yield from _anchors.newest(self._reader)
        if found is not None:
            self.take(found)
            yield from self.catch_up()

    def _take_newer(self, gives_up: bool = False) -> Steps[None]:
        """Takes an anchor of a later round than this island has come to, once there is one."""
        number, deadline = self.anchor.round, self.settings.deadline
        found = yield from _anchors.later(
            self._reader, number, deadline, self.answer, self.tell, gives_up
        )
        if found is not None:
            self.take(found)

    def _read_anchor(self, data: bytes) -> Anchor:
        return _anchor.read(data, self.model, self.outer)
