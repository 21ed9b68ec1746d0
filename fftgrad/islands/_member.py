"""The protocol of an island, without threads, clocks and stores: it yields what it asks of them.

A run is a chain of rounds. What all hold before round r + 1 is a pure function of what they hold
before round r, of the manifest of r, and of the contributions that it names; so all have the same
bits, whoever computes them, and whenever. Whoever first sees that all have come, or that the
deadline is over, writes the manifest by create-if-absent, and whoever is second obeys the first. A
crash between any two requests leaves the old round or the new one, because nothing else decides.
"""

import math
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

from fftgrad.exchanges import AllGather
from fftgrad.islands import (
    _anchor,
    _anchors,
    _claim,
    _contribution,
    _judge,
    _keys,
    _manifest,
    _residual,
    _run,
)
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._anchors import LostError
from fftgrad.islands._contribution import Contribution
from fftgrad.islands._fetch import fetch
from fftgrad.islands._keys import Who
from fftgrad.islands._ledger import Change, Ledger, norm
from fftgrad.islands._manifest import Manifest
from fftgrad.islands._model import Model, Tree
from fftgrad.islands._programs import Outer, Programs
from fftgrad.islands._requests import Clock, List, Read, Steps, Wait, settle
from fftgrad.islands._residual import Residual
from fftgrad.islands._settings import Settings
from fftgrad.memories import ErrorFeedback


class Member:
    """An island as the others see it.

    Every method that is a generator may be dropped at any request, or be stopped by an error of the
    store, and called again.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        *,
        outer: Outer,
        memory: ErrorFeedback,
        settings: Settings | None = None,
        residual: Residual | None = None,
    ) -> None:
        self.name = _keys.check_name(name)
        _residual.check(residual, name, model)
        self._former = residual
        self.model, self.outer = model, outer
        self.ledger = Ledger(memory, model)
        self.asked = settings
        self.traffic: Mapping[str, int] = {}  # that of whoever runs its steps
        self.who = Who(name, 0)
        self.trouble = ""  # why nothing of it counts
        self.answered: set[int] = set()
        self.anchor: Anchor
        self.free = 0.0  # since when nothing of it is under way: it takes inner steps
        self.handed = 0.0  # when it handed in
        self.begun: float | None = None  # when it saw that one of those expected had
        self.programs: Programs
        self._own = b""  # the last contribution
        self.awaited = -1  # the round of the last contribution
        self._is_written = False
        self.sent: Change | None = None  # to be handed in, the last one of the program
        self._change: Change | None = None  # the last one, which is handed in once
        self._fetched: dict[Who, bytes] = {}
        self._named: set[Who] | None = None  # in the last manifest, if the island obeyed it
        self._model = model.digest
        self._told = -math.inf  # when it last looked for others who claim the name
        self._run = b""  # the object of the store that says which run it is
        self._nonce = secrets.token_bytes(16)

    @property
    def known(self) -> tuple[AllGather, ...]:
        """Exchanges that this program has itself."""
        return (self.asked.exchange,) if self.asked else ()

    def start(self, params: Tree) -> Steps[None]:
        """Joins a run, or begins one with these parameters."""
        mine = self.asked or Settings()
        if self.asked:  # before anything of them is written
            first = _anchor.first(params, self.outer, mine)
            _anchor.try_out(first, self.model, self.outer, self.ledger.memory)
        settings, self._run = yield from _run.enter(self.model, mine, self.known)
        first = _anchor.first(params, self.outer, settings)
        found = yield from _anchors.enter(self._read_anchor, first, settings.deadline)
        if found.settings != self.asked:
            _anchor.try_out(found, self.model, self.outer, self.ledger.memory)
        self._take(found)
        yield from self.catch_up()
        grace = self.anchor.settings.deadline  # those in force, by which others answer
        self.who = yield from _claim.claim(self.name, grace, self._nonce)
        yield from self.catch_up()
        _run.check_settings(self.asked, self.anchor.settings)
        yield from self._recall()
        self.free = yield Clock()

    def _recall(self) -> Steps[None]:
        """Takes up what an earlier start had not sent, once it is known what became of that."""
        tree = None
        if (former := self._former) is not None:
            if (yield from _residual.is_open(former, self.name, self.anchor.round)):
                self.awaited, self.handed = self.anchor.round, (yield Clock())
                yield from self.finish()
            tree = yield from _residual.left(former, self.name, self.anchor.round)
        self.ledger.begin(self.anchor.round, tree)

    # Rounds

    def catch_up(self) -> Steps[None]:
        """Obeys all manifests that there are."""
        while (data := (yield Read(_keys.manifest(self.anchor.round)))) is not None:
            manifest = _manifest.read(data, self.anchor.round)
            if manifest.round != self.anchor.round:
                raise LostError(
                    f"Island: must find the manifest of round {self.anchor.round} where it belongs,"
                    f" got that of round {manifest.round}; see who writes into the store."
                )
            yield from self._obey(manifest)

    def answer(self) -> Steps[None]:
        """Tells others who claim the name that it is taken; an error if one has it already."""
        now = yield Clock()
        if now - self._told >= self.anchor.settings.deadline / 4:
            yield from _claim.answer(self.who, self.answered)
            self._told = now

    def hand_in(self, change: Change) -> Steps[None]:
        """All that an island does in a round, from what it learned to what all hold after it."""
        yield from _run.stay(self._run)
        yield from self.contribute(change)
        yield from self.finish()

    def leave(self) -> Steps[None]:
        """Says that the name is free."""
        yield from _run.stay(self._run)
        yield from _claim.leave(self.who)

    def contribute(self, change: Change) -> Steps[None]:
        """Prepares what was learned for the open round, if it can count; once for each change."""
        if change is self._change:
            return
        yield from self.answer()
        yield from self.catch_up()
        number, settings = self.anchor.round, self.anchor.settings
        fault = ""
        if number - change.base > settings.stale:
            fault = f"stale: starts from round {change.base}"
        elif not change.is_finite:
            fault = "not finite"
        blobs, pending = list[bytes](), self.ledger.nothing(number)
        if not fault:
            own = zlib.crc32(str(self.who).encode())
            blobs, pending = self.ledger.compress(self.programs, change, number, own)
        mine = self.asked
        header = Contribution(
            self.who,
            round=number,
            base=change.base,
            anchor=self.anchor.digest,
            settings=settings.digest,
            model=self._model,
            weight=change.weight,
            loss=change.loss,
            held=norm(pending.memory),
            traffic=dict(self.traffic),
            wish=mine.as_dict() if mine and mine.version > settings.version else None,
            fault=fault,
            blobs=[],
        )
        data = _contribution.write(header, blobs)
        self.handed, self.begun = (yield Clock()), None
        self.ledger.hand_in(pending, change)
        self._own = data
        self.awaited, self._is_written, self._change = number, False, change

    def finish(self) -> Steps[None]:
        """Waits until the round of the last contribution is closed, or closes it."""
        pause = self.anchor.settings.deadline / 50
        while self.anchor.round <= self.awaited or self.ledger.pending:
            if self.ledger.pending and not self._is_written:
                key = _keys.contribution(self.awaited, self.who)
                if (yield from settle(key, self._own)) != self._own:
                    raise _claim.NameTakenError(self.name, "under which another one contributes")
                self._is_written = True
            yield from self.answer()
            keys = yield List(_keys.round_folder(self.awaited))
            if self.anchor.round > self.awaited or _keys.manifest(self.awaited) in keys:
                data = yield Read(_keys.manifest(self.awaited))
                if data is not None:
                    yield from self._obey(_manifest.read(data))
            else:
                yield from self._look(_judge.contributors(keys))
            if self.anchor.round <= self.awaited or self.ledger.pending:
                over = self._end - (yield Clock())
                yield Wait(max(0.01, min(pause, over) if over > 0 else pause))
                pause = min(1.5 * pause, self.anchor.settings.deadline / 10)
        self.trouble = self.ledger.trouble
        self.free = yield Clock()

    def _look(self, here: Mapping[Who, str]) -> Steps[None]:
        """Reads what has come to the open round, and closes it if nobody need be waited for."""
        for who in set(here).difference([self.who]):
            yield from self._read(who)
        now, come = (yield Clock()), {self.who, *self._fetched}
        if self.begun is None and _judge.is_begun(self.anchor, come):
            self.begun = now
        if now < self._end and not _judge.is_complete(self.anchor, come):
            return
        yield from self._read(self.who)  # back, as the others will
        manifest = _judge.judge(
            self.anchor,
            self._model,
            self.programs,
            self._fetched,
            self.who,
            now - self.handed,
            (yield from _judge.late(self.anchor.round - 1, self._named)),
            self.known,
        )
        if manifest is not None:
            yield from _run.stay(self._run)
            data = yield from settle(_keys.manifest(manifest.round), _manifest.write(manifest))
            yield from self._obey(_manifest.read(data))
        elif now > self._end + _judge.OVERDUE * self.anchor.settings.deadline:
            self.trouble = _judge.SPLIT.format(self.anchor.round)

    @property
    def _end(self) -> float:
        """When it closes the open round with those that came.

        A deadline after one of those expected: inner steps may take longer than any deadline. Where
        none of them comes it gives them as long as its own inner steps took, and no more, because
        they may all be dead.
        """
        begun = self.begun
        if begun is None:
            begun = self.handed + (self.handed - self.free)
        return begun + self.anchor.settings.deadline

    def _read(self, who: Who) -> Steps[None]:
        """Reads a contribution to the open round, once."""
        if who not in self._fetched:
            data = yield Read(_keys.contribution(self.anchor.round, who))
            if data is not None:
                self._fetched[who] = data

    def _obey(self, manifest: Manifest) -> Steps[None]:
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
            mine = self._own if entry.who == self.who else self._fetched.get(entry.who)
            data = yield from fetch(manifest.round, entry, mine, before.settings.deadline)
            if data is None:
                yield from self._take_newer()
                return
            sent.append(self.programs.from_bytes(_contribution.read(data).blobs))
        self._take(_anchor.after(before, manifest, sent, self.programs, self.outer, self.known))
        self._named = {one.who for one in (*manifest.counted, *manifest.refused)}
        if manifest.by == self.who:
            yield from _anchors.keep(self.anchor)

    # Anchors

    def _take(self, anchor: Anchor) -> None:
        if not hasattr(self, "programs") or self.programs.exchange != anchor.settings.exchange:
            self.programs = Programs.of(self.model, anchor.settings.exchange)
            self.ledger.forget_codecs()
        self.anchor, self.begun, self._named = anchor, None, None
        self._fetched.clear()

    def _take_newer(self) -> Steps[None]:
        """Takes an anchor of a later round than this island has come to, once there is one."""
        now = self.anchor
        later = _anchors.later(self._read_anchor, now.round, now.settings.deadline, self.answer)
        self._take((yield from later))

    def _read_anchor(self, data: bytes) -> Anchor:
        return _anchor.read(data, self.model, self.outer, self.known)
