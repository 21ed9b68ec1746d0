"""The protocol of an island: generators that yield requests, without threads, clocks or stores.

A run is a chain of rounds. A pure function computes the anchor before round r + 1 from the anchor
before round r, the manifest of r, and the contributions in the manifest. So all islands compute the
same bits. An island creates the manifest when it sees all contributions or when the deadline ends.
The first manifest is final, and all islands obey it. The store creates it atomically, so after a
crash between any two requests the round is either open or closed.
"""

import secrets
import warnings
import zlib
from typing import Any

from fftgrad.islands import _objects, _residual, _round, _run
from fftgrad.islands._model import Model, Outer, Programs, Tree
from fftgrad.islands._objects import Contribution, DamagedError, Manifest, Who
from fftgrad.islands._residual import Change, Ledger, Residual
from fftgrad.islands._round import Anchor, Gathering
from fftgrad.islands._run import Settings
from fftgrad.islands._store import Clock, Create, List, Steps, Wait
from fftgrad.memories import ErrorFeedback

OVERDUE = 3
"""Multiple of the deadline that an island with a minority anchor waits before it closes a round.

The wait starts at the end of the round. After the wait, the island first recomputes its anchor."""


class Member:
    """Protocol state of an island that joins a run, contributes changes and closes rounds.

    After an error of the store, or at any request, a caller may drop a generator and start it anew.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        *,
        outer: Outer,
        memory: ErrorFeedback,
        settings: Settings,
        residual: Residual | None = None,
    ) -> None:
        self.who = Who(_objects.check_name(name), 0)
        _residual.refuse_other(residual, name, model)
        self.model, self.settings = model, settings
        self.ledger = Ledger(memory, model)
        self.run = b""  # the bytes of run.json
        self.programs = Programs.of(model, settings.exchange, outer, settings.rate)
        self.gathering: Gathering
        self.trouble = ""  # reason why contributions do not count, or damage of the store
        self.damage = ""  # damage of the store that does not stop the island
        self.own = b""  # the last contribution
        self.awaited = -1  # the round of the last contribution
        self.free = 0.0  # start time of the inner steps
        self.sent: Change | None = None  # the last change of the program
        self._change: Change | None = None  # the last change that was contributed
        self._is_written = True  # True if the store has the last contribution
        self._former = residual
        self._model = model.digest
        self._alone = -1  # round that this island may close with a minority anchor

    def start(self, params: Tree) -> Steps[None]:
        """Join the run of the store, or begin a run with these parameters."""
        # Try the programs before any write, because the codec may not fit the parameters.
        first = _round.first_anchor(params, self.programs)
        state = first.params, first.outer
        self.programs.try_out(self.ledger.memory, state, self.settings.islands)
        self.run = yield from _run.enter_run(self.model, self.settings, secrets.token_hex(16))
        _residual.check_run(self._former, self.run)
        deadline = self.settings.deadline
        self.take((yield from _round.enter_anchor(self.programs, first, deadline, self.tell)))
        yield from self.catch_up()
        self.who = yield from _run.claim_name(self.who.island)
        yield from self.catch_up()
        yield from self._recall()
        self.free = yield Clock()

    def _recall(self) -> Steps[None]:
        """Load the residual of an earlier start, after the round of its last contribution."""
        tree = None
        if (former := self._former) is not None:
            number = self.anchor.round
            if (yield from _residual.is_open(former, self.who, number)):
                self.awaited = number
                self.gathering.hand_in((yield Clock()), 0.0)
                yield from self.finish()
            tree = yield from _residual.left(former, self.who.island, self.anchor.round)
        self.ledger.begin(self.anchor.round, tree)

    def hand_in(self, change: Change) -> Steps[None]:
        """Contribute a change, and wait for the end of the round."""
        self.damage = yield from _run.check_run(self.run)
        yield from self.contribute(change)
        yield from self.finish()

    def contribute(self, change: Change) -> Steps[None]:
        """Compress a change for the open round, unless an earlier call has done so."""
        if change is self._change:
            return
        yield from _run.check_name(self.who)
        yield from self.catch_up()
        number, fault = self.anchor.round, ""
        if number - change.base > self.settings.stale:
            fault = f"stale: starts from round {change.base}"
        elif not change.is_finite:
            fault = "not finite"
        if fault:  # an empty contribution, so that the next round waits for this island
            blobs, pending = list[bytes](), None
        else:
            own = zlib.crc32(str(self.who).encode())
            blobs, pending = self.ledger.compress(self.programs, change, number, own)
        contribution = Contribution(
            self.who,
            round=number,
            base=change.base,
            anchor=self.anchor.digest,
            model=self._model,
            weight=change.weight,
            loss=change.loss,
            fault=fault,
            blobs=blobs,
        )
        now = yield Clock()
        self.gathering.hand_in(now, now - self.free)
        if pending:
            self.ledger.hand_in(pending, change)
        else:
            self.ledger.refuse(change, number, fault)
        self.own = contribution.to_bytes()
        self.awaited, self._is_written, self._change = number, False, change

    def finish(self) -> Steps[None]:
        """Wait until the round of the last contribution is closed, or close it."""
        pause = self.settings.deadline / 50
        while self.anchor.round <= self.awaited or self.ledger.pending:
            if not self._is_written:
                yield Create(_objects.contribution_key(self.awaited, self.who), self.own)
                self._is_written = True
            yield from self._look()
            if self.anchor.round <= self.awaited or self.ledger.pending:
                over = self.gathering.end - (yield Clock())
                yield Wait(max(0.01, min(pause, over) if over > 0 else pause))
                pause = min(1.5 * pause, self.settings.deadline / 10)
        self.trouble = self.ledger.trouble or self.damage
        self.free = yield Clock()

    def _look(self) -> Steps[None]:
        """Obey the manifest of the awaited round, or create one if the round can close."""
        number, manifest = self.awaited, None
        if self.anchor.round < number:
            yield from self.catch_up()
        keys = yield List(_objects.round_folder(number))
        if self.anchor.round > number or _objects.manifest_key(number) in keys:
            manifest = yield from self._decision(number)
        if manifest is not None:
            yield from self.obey(manifest)
        elif self.anchor.round == number and (yield from self.gathering.look(keys, self.who)):
            yield from self._close()

    def _decision(self, number: int) -> Steps[Manifest | None]:
        """Read the manifest of a round. If it is damaged, continue from a newer anchor."""
        try:
            return (yield from _round.decision(number))
        except DamagedError as error:
            self.damage = str(error)
            self.tell(self.damage)
        if self.anchor.round == number:
            yield from self._take_newer()
        else:  # the contribution may have counted, so do not send it again
            self.ledger.forget(self.damage)
        return None

    def _close(self) -> Steps[None]:
        """Create the manifest of the open round, or obey the manifest of a faster island."""
        yield from self.gathering.read(self.who)  # own contribution, as the others read it
        now, number = (yield Clock()), self.anchor.round
        manifest = _round.manifest_of(
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
                # Recompute the anchor from the newest intact one and the manifests after it.
                found, _ = yield from _round.newest_anchor(self.programs)
                if found is not None:
                    self.take(found)
                    yield from self.catch_up()
                self._alone = number
            return
        yield from _run.check_run(self.run)
        yield Create(_objects.manifest_key(number), manifest.to_bytes())
        manifest = yield from self._decision(number)  # another island may have been faster
        if manifest is not None:
            yield from self.obey(manifest)

    @property
    def anchor(self) -> Anchor:
        """Common state of all islands before the open round."""
        return self.gathering.anchor

    @anchor.setter
    def anchor(self, anchor: Anchor) -> None:
        self.gathering.anchor = anchor

    def tell(self, trouble: str) -> None:
        """Record a problem. During the start, also warn, because the program cannot read it."""
        self.trouble = trouble
        if not self.who.incarnation:
            warnings.warn(f"Island: {trouble}.", UserWarning, stacklevel=2)

    def catch_up(self) -> Steps[None]:
        """Obey all manifests in the store."""
        number = -1
        while self.anchor.round > number:
            number = self.anchor.round
            manifest = yield from self._decision(number)
            if manifest is not None:
                yield from self.obey(manifest)

    def obey(self, manifest: Manifest) -> Steps[None]:
        """Take the outer step of a round. If data for the step are missing, load a newer anchor."""
        self.ledger.resolve(manifest, self.who)
        before = self.anchor
        if manifest.round != before.round:
            return
        if manifest.anchor != before.digest:
            yield from self._take_newer()
            return
        sent: list[Any] = []
        for entry in manifest.counted:
            mine = self.own if entry.who == self.who else self.gathering.found.get(entry.who)
            deadline = self.settings.deadline
            data = yield from _round.fetch(manifest.round, entry, mine, deadline)
            if data is None:
                yield from self._take_newer()
                return
            blobs = Contribution.from_bytes(data).blobs
            sent.append(self.programs.from_bytes(blobs))
        self.take(_round.next_anchor(before, manifest, sent, self.programs))
        self.gathering.named = {one.who for one in (*manifest.counted, *manifest.refused)}
        if manifest.by == self.who:
            yield from _round.keep_anchor(self.anchor, self.settings.anchors)

    def take(self, anchor: Anchor) -> None:
        before = getattr(self, "gathering", None)
        self.gathering = Gathering(anchor, self.settings)
        if before is not None:
            self.gathering.hand_in(before.handed, before.trained)

    def _take_newer(self) -> Steps[None]:
        """Wait for an anchor of a later round, and continue from it."""
        number, deadline = self.anchor.round, self.settings.deadline
        self.take((yield from _round.later_anchor(self.programs, number, deadline, self.tell)))
