"""The protocol of an island, without threads, clocks and stores: it yields what it asks of them.

A run is a chain of rounds. What all hold before round r + 1 is a pure function of what they hold
before round r, of the manifest of r, and of the contributions that it names; so all have the same
bits, whoever computes them, and whenever. Whoever first sees that all have come, or that the
deadline is over, writes the manifest by create-if-absent, and whoever is second obeys the first. A
crash between any two requests leaves the old round or the new one, because nothing else decides.
"""

import secrets
import zlib

from fftgrad.islands import (
    _anchor,
    _anchors,
    _claim,
    _contribution,
    _judge,
    _keys,
    _log,
    _manifest,
    _residual,
    _run,
)
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._contribution import Contribution
from fftgrad.islands._follower import Follower
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._ledger import Change, Ledger, norm
from fftgrad.islands._log import Decision
from fftgrad.islands._model import Model, Tree
from fftgrad.islands._programs import Outer, Programs
from fftgrad.islands._requests import Clock, Create, List, Steps, Wait, settle
from fftgrad.islands._residual import Residual
from fftgrad.islands._settings import Settings
from fftgrad.memories import ErrorFeedback

OVERDUE = 3
"""Deadlines after its end for which a round may be open, before who may not close it does."""

SPLIT = (
    "round {} stayed open: this island holds another anchor than most who came, and none of them "
    "closes it; it computes again what all hold, and closes it"
)


class Member(Follower):
    """An island as the others see it: it hands in what it learned, and closes rounds."""

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
        super().__init__(name, model, outer, Ledger(memory, model))
        self.asked = settings
        self._former = residual
        self.free = 0.0  # since when nothing of it is under way: it takes inner steps
        self.awaited = -1  # the round of the last contribution
        self._is_written = False
        self.sent: Change | None = None  # to be handed in, the last one of the program
        self._change: Change | None = None  # the last one, which is handed in once
        self._model = model.digest
        self._nonce = secrets.token_bytes(16)
        self._alone = -1  # the round that it closes, though most who came hold another anchor

    def start(self, params: Tree) -> Steps[None]:
        """Joins a run, or begins one with these parameters."""
        if self.asked:  # before anything of them is written
            self._compile(params, self.asked)
        own = self._nonce.hex()
        self.settings, self.run = yield from _run.enter(self.model, self.asked, own)
        _residual.check_run(self._former, self.run)
        first = self._compile(params, self.settings)
        found = yield from _anchors.enter(self._reader, first, self.settings.deadline, self.tell)
        self.take(found)
        yield from self.catch_up()
        self.who = yield from _claim.claim(self.name, self.settings.deadline, self._nonce)
        yield from self.catch_up()
        yield from self._recall()
        self.free = yield Clock()

    def _compile(self, params: Tree, settings: Settings) -> Anchor:
        """Compile the programs of a run, and return its first anchor if it begins here.

        A codec that does not fit the parameters is an error here.
        """
        first = _anchor.first(params, self.outer, settings)
        self.programs = Programs.of(self.model, settings.exchange)
        state, rate = (first.params, first.outer), settings.rate
        self.programs.try_out(self.ledger.memory, self.outer, rate, state, settings.islands)
        return first

    def _recall(self) -> Steps[None]:
        """Takes up what an earlier start had not sent, once it is known what became of that."""
        tree = None
        if (former := self._former) is not None:
            number, most = self.anchor.round, self.gathering.most
            if (yield from _residual.is_open(former, self.who, number, most)):
                self.awaited = number
                self.gathering.hand_in((yield Clock()), 0.0)
                yield from self.finish()
            tree = yield from _residual.left(former, self.name, self.anchor.round)
        self.ledger.begin(self.anchor.round, tree)

    def hand_in(self, change: Change) -> Steps[None]:
        """All that an island does in a round, from what it learned to what all hold after it."""
        self.damage = yield from _run.stay(self.run)
        yield from self.contribute(change)
        yield from self.finish()

    def leave(self) -> Steps[None]:
        """Says that the name is free, and that no round need wait for the island."""
        yield from _run.stay(self.run)
        if self.own:
            number = max(self.anchor.round, self.awaited + self._is_written)
            yield Create(_keys.left(number, self.who), b"")
        yield from _claim.leave(self.who)

    def contribute(self, change: Change) -> Steps[None]:
        """Prepares what was learned for the open round, if it can count; once for each change."""
        if change is self._change:
            return
        yield from self.answer()
        yield from self.catch_up()
        number = self.anchor.round
        fault = ""
        if number - change.base > self.settings.stale:
            fault = f"stale: starts from round {change.base}"
        elif not change.is_finite:
            fault = "not finite"
        blobs, pending = list[bytes](), self.ledger.nothing(number)
        if not fault:
            own = zlib.crc32(str(self.who).encode())
            blobs, pending = self.ledger.compress(self.programs, change, number, own)
        header = Contribution(
            self.who,
            round=number,
            base=change.base,
            anchor=self.anchor.digest,
            model=self._model,
            weight=change.weight,
            loss=change.loss,
            held=norm(pending.memory),
            fault=fault,
            blobs=[],
        )
        data = _contribution.write(header, blobs)
        now = yield Clock()
        self.gathering.hand_in(now, now - self.free)
        self.ledger.hand_in(pending, change)
        self.own = data
        self.awaited, self._is_written, self._change = number, False, change

    def finish(self) -> Steps[None]:
        """Waits until the round of the last contribution is closed, or closes it."""
        pause = self.settings.deadline / 50
        while self.anchor.round <= self.awaited or self.ledger.pending:
            if self.ledger.pending and not self._is_written:
                yield from self._write()
            yield from self.answer()
            yield from self._look()
            if self.anchor.round <= self.awaited or self.ledger.pending:
                over = self.gathering.end - (yield Clock())
                yield Wait(max(0.01, min(pause, over) if over > 0 else pause))
                pause = min(1.5 * pause, self.settings.deadline / 10)
        self.trouble = self.ledger.trouble or self.damage
        self.free = yield Clock()

    def _write(self) -> Steps[None]:
        """Writes the contribution, which nobody else may have under this name."""
        key = _keys.contribution(self.awaited, self.who)
        try:
            found = yield from settle(key, self.own, len(self.own))
            if found != self.own:
                _contribution.read(found, len(self.programs.sizes))
                raise _claim.NameTakenError(self.name, "under which another one contributes")
        except DamagedError:  # its own, which the store did not keep as it was
            pass
        self._is_written = True

    def _look(self) -> Steps[None]:
        """Obeys what decides the round of the last contribution, or closes it if it is time."""
        if self.anchor.round < self.awaited:
            yield from self.catch_up()
        is_over = self.anchor.round > self.awaited
        keys = yield List(_keys.round_folder(self.awaited))
        found = Decision(None, 0, "")
        if is_over or any(map(_keys.is_manifest, keys)):
            found = yield from _log.decision(self.awaited)
        if found.manifest is not None:
            yield from self.obey(found.manifest)
        elif is_over:
            if found.damage:
                self.ledger.forget(found.damage)
        elif not (yield from self.is_passed(found.damage)) and (
            yield from self.gathering.look(keys, self.who, self.answer)
        ):
            yield from self._close(found.copy)

    def _close(self, copy: int) -> Steps[None]:
        """Writes the manifest of the open round, or obeys that of who was faster."""
        yield from self.gathering.read(self.who)  # back, as the others will
        now, number = (yield Clock()), self.anchor.round
        manifest = _judge.judge(
            self.gathering,
            self._model,
            self.programs,
            self.who,
            now - self.gathering.handed,
            (yield from self.gathering.late()),
            alone=self._alone == number,
        )
        if manifest is None:
            if now > self.gathering.end + OVERDUE * self.settings.deadline:
                self.tell(SPLIT.format(number))
                yield from self.compute_again()
                self._alone = number
            return
        yield from _run.stay(self.run)
        yield Create(_keys.manifest(number, copy), _manifest.write(manifest))
        found = yield from _log.decision(number)  # back, as the others will
        if found.manifest is not None:
            yield from self.obey(found.manifest)
