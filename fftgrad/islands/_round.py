"""The rounds of a run: contributions gather, a manifest decides, an outer step makes an anchor.

A store creates an object only if there is none, so all readers find the same manifest of a round.
An anchor holds what all islands have before a round.
"""

import dataclasses
import math
import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fftgrad._contracts import Like, PyTree
from fftgrad.exchanges._parts import Payloads
from fftgrad.islands import _keys, _objects
from fftgrad.islands._keys import Who
from fftgrad.islands._model import Array, Model, Outer, Programs, Tree, on_host
from fftgrad.islands._objects import Contribution, DamagedError, Entry, Manifest, Refusal
from fftgrad.islands._run import Settings
from fftgrad.islands._store import Clock, Create, Delete, List, Read, Steps, Wait, settle


def decision(number: int) -> Steps[Manifest | None]:
    """Read the manifest that decides a round; None if the round is open."""
    key = _keys.manifest(number)
    data = yield Read(key)
    try:
        return None if data is None else Manifest.from_bytes(data, number)
    except DamagedError as error:
        raise DamagedError(f"{key} is damaged ({error})") from None


ANCHOR = b"FFTA"


class Anchor(NamedTuple):
    """What all hold before a round: a function of the first anchor and the rounds since."""

    round: int  # the open one
    params: Tree
    outer: PyTree  # the state of the outer optimizer
    expected: tuple[str, ...] | None  # islands the round waits for; None: any, by the settings
    digest: str  # of all these

    def to_bytes(self) -> bytes:
        """The anchor as an object."""
        leaves: list[Array] = jax.tree.leaves((self.params, self.outer))
        header = {
            "round": self.round,
            "expected": self.expected,
            "leaves": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
        }
        blobs = [np.ascontiguousarray(leaf).tobytes() for leaf in leaves]
        return _objects.pack(ANCHOR, header, blobs)


def make_anchor(number: int, params: Tree, outer: PyTree, expected: Sequence[str] | None) -> Anchor:
    """The anchor of a round, with its digest."""
    names = None if expected is None else tuple(expected)
    total = zlib.crc32(repr((number, names)).encode())
    for leaf in jax.tree.leaves((params, outer)):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return Anchor(number, params, outer, names, f"{total:08x}")


def first_anchor(params: Tree, programs: Programs) -> Anchor:
    """The anchor of a run that begins with these parameters."""
    with on_host():
        state = jax.device_get(programs.outer(programs.rate).init(params))
    return make_anchor(0, params, jax.tree.map(np.asarray, state), None)


def next_anchor(
    before: Anchor, manifest: Manifest, sent: Sequence[list[Payloads]], programs: Programs
) -> Anchor:
    """The anchor after a round: the outer step on the contributions of its manifest."""
    state = before.params, before.outer
    if sent:
        state = programs.advance(state, sent, manifest.shares, manifest.round)
    return make_anchor(before.round + 1, *state, manifest.expected)


class AnchorReader:
    """Reads the anchors of a model and an outer optimizer."""

    def __init__(self, model: Model, outer: Outer) -> None:
        state = jax.eval_shape(outer(1.0).init, model.likes)  # its shapes are those of any rate
        likes, self._structure = jax.tree.flatten((model.likes, state))
        self._likes: list[Like] = likes

    def read(self, data: bytes) -> Anchor:
        """The anchor of an object; a `DamagedError` if it is none, or one of other shapes."""
        header, blobs = _objects.unpack(ANCHOR, data)
        if header["leaves"] != [[str(like.dtype), list(like.shape)] for like in self._likes]:
            raise DamagedError("anchor of other parameters, or of another outer optimizer")
        pairs = zip(blobs, self._likes, strict=True)
        leaves = [np.frombuffer(blob, like.dtype).reshape(like.shape) for blob, like in pairs]
        params, state = jax.tree.unflatten(self._structure, leaves)
        return make_anchor(header["round"], params, state, header["expected"])


ANCHORS_KEPT = 2
"""The newest anchor, and one to go back to if that is damaged."""
PATIENCE = 100
"""Deadlines without a new object after which an island says that it waits."""


def anchor_numbers() -> Steps[list[int]]:
    """The rounds of all anchors, in ascending order."""
    found = [_keys.number_of(key) for key in (yield List(_keys.ANCHORS))]
    return sorted({number for number in found if number is not None})


def newest_anchor(
    reader: AnchorReader, after: int = -1
) -> Steps[tuple[Anchor | None, DamagedError | None]]:
    """The newest whole anchor after a round, and the damage of the last one passed over."""
    problem: DamagedError | None = None
    for number in reversed((yield from anchor_numbers())):
        if number <= after:
            break
        data = yield Read(_keys.anchor(number))
        try:
            if data is not None:
                return reader.read(data), problem
        except DamagedError as error:
            problem = error
    return None, problem


def later_anchor(
    reader: AnchorReader,
    after: int,
    deadline: float,
    tell: Callable[[str], None],
) -> Steps[Anchor]:
    """Wait for an anchor after a round, for an island that cannot compute it.

    It waits however long rounds take, and tells if no object comes to the store.
    """
    seen: set[str] = set()
    end = (yield Clock()) + PATIENCE * deadline
    while (found := (yield from newest_anchor(reader, after))[0]) is None:
        now = set((yield List(_keys.ROUNDS, _keys.round_folder(max(0, after))))) - seen
        if now:
            seen |= now
            end = (yield Clock()) + PATIENCE * deadline
        elif (yield Clock()) >= end:
            tell(
                f"waits for an anchor after round {after}, because it cannot go on from there, and "
                f"nothing came to the store in {PATIENCE * deadline:.0f} s; see whether another "
                "island lives"
            )
        yield Wait(deadline / 4)
    return found


def enter_anchor(
    reader: AnchorReader, first: Anchor, deadline: float, tell: Callable[[str], None]
) -> Steps[Anchor]:
    """The newest anchor of a run. A run without one begins with `first`."""
    found, problem = yield from newest_anchor(reader)
    if found is None and problem is None:
        if (yield Read(_keys.manifest(0))) is None:
            data = yield from settle(_keys.anchor(0), first.to_bytes())
            found = reader.read(data)
        else:  # removed, or not listed yet
            found = yield from later_anchor(reader, -1, deadline, tell)
    if found is None:
        raise ValueError(
            f"Island(store): must have an anchor that is whole, got one that is not, or does "
            f"not fit ({problem}); take another folder, or the outer optimizer of the run."
        )
    return found


def keep_anchor(anchor: Anchor, every: int) -> Steps[None]:
    """Write every so many rounds the anchor, and remove what is older than the two newest.

    The writer of a manifest does so after it has obeyed it. If it dies before, a later round makes
    up for it. Manifests stay: a round that has one is never closed again.
    """
    if anchor.round % every:
        return
    yield Create(_keys.anchor(anchor.round), anchor.to_bytes())
    found = yield from anchor_numbers()
    before = found[-ANCHORS_KEPT:][0] if found else 0
    if old := tuple(_keys.anchor(number) for number in found if number < before):
        yield Delete(old)
    # As far back as the last removal, and once more in case that failed.
    start = _keys.round_folder(max(0, before - (ANCHORS_KEPT + 1) * every))
    old = tuple(
        key
        for key in (yield List(_keys.ROUNDS, start))
        if (number := _keys.number_of(key)) is not None
        and number < before
        and key != _keys.manifest(number)
    )
    if old:
        yield Delete(old)


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


def manifest_of(
    gathering: Gathering,
    model: str,
    programs: Programs,
    by: Who,
    waited: float,
    late: Iterable[str] = (),
    alone: bool = False,
) -> Manifest | None:
    """The manifest of a round as this island sees it; None if it may not write it.

    An island that holds another anchor than most of the islands that came leaves the manifest to
    them, unless it is `alone`, because they did not write it. A round in which nothing counts is
    closed too, and changes nothing: left open, it would block all.

    The next round waits for the islands that kept pace, for those that were `late`, and for those
    that are there with nothing to hand in. It does not wait for a slow island, whose change starts
    from an earlier round.
    """
    anchor, limit, back = gathering.anchor, gathering.settings.limit, set(late)
    checked: dict[Who, Entry] = {}
    refused: dict[Who, str] = {}
    held: list[str] = []
    for who, data in sorted(gathering.found.items()):
        try:
            contribution = Contribution.from_bytes(data)
            if contribution.round == anchor.round and contribution.model == model:
                held.append(contribution.anchor)
            if contribution.who == who and contribution.fault:
                back.add(who.island)
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
            refused[who] = str(error)
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
        expected=sorted(pace | back or came),
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
        newer = yield from anchor_numbers()
        now = yield Clock()
        if (newer and newer[-1] > number) or now >= end:
            return None
        yield Wait(max(0.01, min(deadline / 10, end - now)))


def _is_named(data: bytes | None, entry: Entry) -> bool:
    return data is not None and _objects.digest(data) == entry.sha256
