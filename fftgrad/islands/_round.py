"""A round: which contributions have come, which of them count, and how to fetch those that do."""

import dataclasses
import math
import statistics
from collections.abc import Collection

import numpy as np

from fftgrad.islands import _keys, _log, _objects
from fftgrad.islands._keys import Who
from fftgrad.islands._log import Anchor
from fftgrad.islands._model import Programs
from fftgrad.islands._objects import Contribution, DamagedError, Entry, Manifest, Refusal
from fftgrad.islands._requests import Clock, List, Read, Steps, Wait
from fftgrad.islands._settings import Settings


@dataclasses.dataclass(eq=False)
class Gathering:
    """The contributions to the open round, as one island sees them come."""

    anchor: Anchor
    settings: Settings
    named: Collection[Who] | None = None  # in the manifest of the round before, if it was obeyed
    found: dict[Who, bytes] = dataclasses.field(default_factory=dict)
    handed: float = 0.0  # when this island handed in
    trained: float = 0.0  # seconds that its inner steps took
    begun: float | None = None  # when it saw that an expected island had come

    def hand_in(self, now: float, trained: float) -> None:
        """Start to wait for the others."""
        self.handed, self.trained, self.begun = now, trained, None

    @property
    def end(self) -> float:
        """The time at which the island closes the round with the contributions that came.

        It is a deadline after an expected island has come, because inner steps may take longer than
        any deadline. While none has come, the others get as long as its own inner steps took, and
        no more, because they may all be dead.
        """
        begun = self.handed + self.trained if self.begun is None else self.begun
        return begun + self.settings.deadline

    def look(self, keys: Collection[str], own: Who) -> Steps[bool]:
        """Read the contributions among the keys of the round; return whether it can be closed."""
        for who in sorted(_keys.contributors(keys) - {own}):
            yield from self.read(who)
        here, now = {who.island for who in (own, *self.found)}, (yield Clock())
        expected = self.anchor.expected
        if self.begun is None and (not expected or here.intersection(expected)):
            self.begun = now
        if expected is None:
            return now >= self.end or len(here) >= self.settings.islands
        return now >= self.end or here >= set(expected)

    def read(self, who: Who) -> Steps[None]:
        """Read a contribution, once."""
        if who in self.found:
            return
        data = yield Read(_keys.contribution(self.anchor.round, who))
        if data is not None:
            self.found[who] = data

    def late(self) -> Steps[list[str]]:
        """Islands that came to the round before after it was closed.

        None if this island does not know which came in time.
        """
        if self.named is None:
            return []
        keys = yield List(_keys.round_folder(self.anchor.round - 1))
        return [who.island for who in _keys.contributors(keys) - set(self.named)]


MOST_REASON = 300
"""Most characters of the reason of a refusal. Its sender has a say in them."""


def manifest_of(
    gathering: Gathering,
    model: str,
    programs: Programs,
    by: Who,
    waited: float,
    back: Collection[str] = (),
    alone: bool = False,
) -> Manifest | None:
    """The manifest of a round as this island sees it; None if it may not write it.

    An island that holds another anchor than most of the islands that came leaves the manifest to
    them, unless it is `alone`, because they did not write it. A round in which nothing counts is
    closed too, and changes nothing: left open, it would block all.

    The next round waits for the islands that kept pace, and for those that are `back`. It does not
    wait for a slow island, whose change starts from an earlier round.
    """
    anchor, limit = gathering.anchor, gathering.settings.limit
    checked: dict[Who, Entry] = {}
    refused: dict[Who, str] = {}
    held: list[str] = []
    for who, data in sorted(gathering.found.items()):
        try:
            contribution = Contribution.from_bytes(data)
            if contribution.round == anchor.round and contribution.model == model:
                held.append(contribution.anchor)
            _check(contribution, who, anchor, model, gathering.settings.stale)
            norm = _norm(programs, contribution)
            checked[who] = Entry(
                *who,
                sha256=_objects.digest(data),
                weight=contribution.weight,
                base=contribution.base,
                loss=contribution.loss,
                norm=norm,
            )
        except DamagedError as error:
            refused[who] = str(error)[:MOST_REASON]
    if not alone and held.count(anchor.digest) < max(map(held.count, held), default=0):
        return None
    newest = {who.island: who for who in checked}  # they ascend
    early = {who for who in checked if who != newest[who.island]}
    refused |= dict.fromkeys(early, "of an earlier start of its name")
    counted = [entry for who, entry in checked.items() if who not in early]
    norm = statistics.median_low([entry.norm for entry in counted if entry.norm] or [0.0])
    long = [entry for entry in counted if entry.norm > limit * norm]
    refused |= {e.who: f"norm {e.norm:.3g}, the median has {norm:.3g}" for e in long}
    counted = [entry for entry in counted if entry not in long]
    # An island that trained on alone has learned more, but its weight is bounded.
    most = limit * statistics.median_low([entry.weight for entry in counted] or [0.0])
    counted = [entry._replace(weight=min(entry.weight, most)) for entry in counted]
    came = {who.island for who in gathering.found}
    pace = {entry.island for entry in counted if entry.base == anchor.round}
    return Manifest(
        round=anchor.round,
        by=by,
        anchor=anchor.digest,
        counted=counted,
        refused=[Refusal(*who, reason) for who, reason in sorted(refused.items())],
        missed=sorted(set(anchor.expected or ()) - came),
        expected=sorted(pace.union(back) or came),
        waited=waited,
    )


def _check(contribution: Contribution, who: Who, anchor: Anchor, model: str, stale: int) -> None:
    number = anchor.round
    if contribution.who != who:
        raise DamagedError(f"says that it is of {contribution.who}")
    if contribution.round != number:
        raise DamagedError(f"for round {contribution.round}")
    if contribution.model != model:
        raise DamagedError("of another model")
    if contribution.anchor != anchor.digest:
        raise DamagedError(f"holds another anchor, {contribution.anchor}")
    if contribution.base > number:
        raise DamagedError(f"starts from round {contribution.base}, which is not there yet")
    if number - contribution.base > stale:
        raise DamagedError(f"stale: starts from round {contribution.base}")


def _norm(programs: Programs, contribution: Contribution) -> float:
    """The norm of a contribution, decoded; a `DamagedError` if it is not finite."""
    vectors = programs.decode(programs.from_bytes(contribution.blobs), contribution.round)
    squares = (np.dot(wide, wide) for wide in (v.astype(np.float64) for v in vectors))
    norm = math.sqrt(sum(map(float, squares)))
    if not math.isfinite(norm):
        raise DamagedError("not finite")
    return norm


def fetch(
    number: int,
    entry: Entry,
    mine: bytes | None,
    deadline: float,
) -> Steps[bytes | None]:
    """The bytes of a contribution that a manifest names; None if the store has them no more.

    `mine` are the bytes that this island has, which may be others.
    """
    end = (yield Clock()) + deadline
    data = mine
    while True:
        if not _is_named(data, entry):
            data = yield Read(_keys.contribution(number, entry.who))
        if data is not None and _is_named(data, entry):
            return data
        newer = yield from _log.numbers()
        now = yield Clock()
        if (newer and newer[-1] > number) or now >= end:
            return None
        yield Wait(max(0.01, min(deadline / 10, end - now)))


def _is_named(data: bytes | None, entry: Entry) -> bool:
    return data is not None and _objects.digest(data) == entry.sha256
