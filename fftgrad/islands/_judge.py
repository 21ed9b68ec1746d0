"""Which contributions count in a round, and why others do not."""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fftgrad.islands import _contribution
from fftgrad.islands._anchor import Anchor
from fftgrad.islands._contribution import Contribution
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._gathering import Gathering
from fftgrad.islands._keys import Who
from fftgrad.islands._manifest import Entry, Manifest, Refusal
from fftgrad.islands._programs import Programs

MOST_REASON = 300
"""Characters of why a contribution is refused, which its sender has a say in."""


class Seen(NamedTuple):
    """A contribution that nothing is wrong with, taken alone."""

    contribution: Contribution
    data: bytes
    norm: float


def judge(
    gathering: Gathering,
    model: str,
    programs: Programs,
    by: Who,
    waited: float,
    back: Iterable[str] = (),
    alone: bool = False,
) -> Manifest | None:
    """The manifest of a round as this island sees it; None if it may not write it.

    An island that holds another anchor than most of those who came leaves it to them, unless it is
    `alone`: they do not. Where nothing counts the round is closed all the same, and changes
    nothing, or its open end would be in the way of all. The next round waits for those who are
    `back`, too, and for those who say that they have nothing to hand in, but are there.
    """
    anchor, found, back = gathering.anchor, gathering.found, set(back)
    settings = gathering.settings
    seen: list[Seen] = []
    refused: dict[Who, str] = {}
    held: list[str] = []
    for who, data in sorted(found.items()):
        try:
            if isinstance(data, DamagedError):
                raise data
            contribution = _contribution.read(data, len(programs.sizes))
            if contribution.round == anchor.round and contribution.model == model:
                held.append(contribution.anchor)
            if contribution.who == who and contribution.fault:
                back.add(who.island)
            _check(contribution, who, anchor, model, settings.stale)
            payloads = programs.from_bytes(contribution.blobs)
            norm = _norm(programs, payloads, anchor.round)
            if not math.isfinite(norm):
                raise DamagedError("not finite")
            seen.append(Seen(contribution, data, norm))
        except DamagedError as error:
            refused[who] = str(error)[:MOST_REASON]
    if not alone and held.count(anchor.digest) < max(map(held.count, held), default=0):
        return None
    seen, others = _newest(seen)
    refused |= others
    seen, others = _within(seen, settings.limit)
    refused |= others
    counted = _entries(seen, settings.limit)
    came = {who.island for who in found}
    return Manifest(
        round=anchor.round,
        by=by,
        anchor=anchor.digest,
        counted=counted,
        refused=[Refusal(*who, reason) for who, reason in sorted(refused.items())],
        missed=sorted(set(anchor.expected or ()) - came - gathering.left),
        expected=_expected(counted, back, came, anchor),
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
    if contribution.fault:
        raise DamagedError(contribution.fault)
    if contribution.anchor != anchor.digest:
        raise DamagedError(f"holds another anchor, {contribution.anchor}")
    if contribution.base > number:
        raise DamagedError(f"starts from round {contribution.base}, which is not there yet")
    if number - contribution.base > stale:
        raise DamagedError(f"stale: starts from round {contribution.base}")


def _norm(programs: Programs, payloads: object, number: int) -> float:
    vectors = programs.decode(payloads, number)  # type: ignore[arg-type]
    squares = (np.dot(wide, wide) for wide in (v.astype(np.float64) for v in vectors))
    return math.sqrt(sum(map(float, squares)))


def _newest(seen: list[Seen]) -> tuple[list[Seen], dict[Who, str]]:
    """Of each name the newest incarnation."""
    newest = {one.contribution.who.island: one.contribution.who for one in seen}  # they ascend
    kept = [one for one in seen if one.contribution.who in newest.values()]
    others = [one.contribution.who for one in seen if one not in kept]
    return kept, dict.fromkeys(others, "of an earlier start of its name")


def _within(seen: list[Seen], limit: float) -> tuple[list[Seen], dict[Who, str]]:
    """Those whose norms are no more than `limit` times the median's."""
    norm = statistics.median_low([one.norm for one in seen if one.norm] or [0.0])
    long = [one for one in seen if one.norm > limit * norm]
    said = {one.contribution.who: f"norm {one.norm:.3g}, the median has {norm:.3g}" for one in long}
    return [one for one in seen if one not in long], said


def _entries(seen: list[Seen], limit: float) -> list[Entry]:
    """What the manifest says of those that count, none above `limit` times the median weight.

    An island that trained on alone while it was cut off has learned more, but not without bound.
    """
    most = limit * statistics.median_low([one.contribution.weight for one in seen] or [0.0])
    found: list[Entry] = []
    for one in seen:
        header = one.contribution
        entry = Entry(
            *header.who,
            sha256=_contribution.digest(one.data),
            weight=min(header.weight, most),
            base=header.base,
            loss=header.loss,
            norm=one.norm,
            held=header.held,
        )
        found.append(entry)
    return found


def _expected(counted: list[Entry], back: set[str], came: set[str], anchor: Anchor) -> list[str]:
    """Whom the next round waits for: those that kept pace, and those that are back.

    Not a slow one, whose change starts from a round before: it comes when it can.
    """
    pace = {entry.island for entry in counted if entry.base == anchor.round}
    return sorted(pace | back or came)
