"""Rounds of a run: islands contribute, a manifest closes the round, an outer step makes an anchor.

Objects of a store never change, so all islands read the same manifest of a round. The anchor before
a round contains the common parameters and the state of the outer optimizer.
"""

import dataclasses
import math
import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad._values import check
from fftgrad.exchanges._parts import Payloads
from fftgrad.islands import _objects
from fftgrad.islands._model import Array, Programs, Tree, on_host
from fftgrad.islands._objects import Contribution, DamagedError, Entry, Manifest, Refusal, Who
from fftgrad.islands._run import Settings
from fftgrad.islands._store import Clock, Create, Delete, List, Read, Steps, Wait, settle


def decision(number: int) -> Steps[Manifest | None]:
    """Read the manifest of a round; return None if the round is open."""
    key = _objects.manifest_key(number)
    data = yield Read(key)
    try:
        return None if data is None else Manifest.from_bytes(data, number)
    except DamagedError as error:
        raise DamagedError(f"{key} is damaged ({error})") from None


ANCHOR = b"FFTA"


class Anchor(NamedTuple):
    """The common state of all islands before a round."""

    round: int  # the open round
    params: Tree
    outer: PyTree  # the state of the outer optimizer
    expected: tuple[str, ...] | None  # names to wait for; None: any `settings.islands` islands
    digest: str  # digest of the other fields

    def to_bytes(self) -> bytes:
        leaves: list[Array] = jax.tree.leaves((self.params, self.outer))
        header = {
            "round": self.round,
            "expected": self.expected,
            "leaves": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
        }
        blobs = [np.ascontiguousarray(leaf).tobytes() for leaf in leaves]
        return _objects.pack(ANCHOR, header, blobs)


def make_anchor(number: int, params: Tree, outer: PyTree, expected: Sequence[str] | None) -> Anchor:
    """Make the anchor of a round, with its digest."""
    names = None if expected is None else tuple(expected)
    total = zlib.crc32(repr((number, names)).encode())
    for leaf in jax.tree.leaves((params, outer)):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return Anchor(number, params, outer, names, f"{total:08x}")


def first_anchor(params: Tree, programs: Programs) -> Anchor:
    """Make the anchor before round 0 from these parameters."""
    with on_host():
        state = jax.device_get(programs.outer(programs.rate).init(params))
    return make_anchor(0, params, jax.tree.map(np.asarray, state), None)


def next_anchor(
    before: Anchor, manifest: Manifest, sent: Sequence[list[Payloads]], programs: Programs
) -> Anchor:
    """Compute the next anchor by an outer step on the counted contributions, `sent`."""
    state = before.params, before.outer
    if sent:
        state = programs.advance(state, sent, manifest.shares, manifest.round)
    return make_anchor(before.round + 1, *state, manifest.expected)


def read_anchor(data: bytes, programs: Programs) -> Anchor:
    """Parse an anchor; raise `DamagedError` if it is damaged or of other shapes or dtypes."""
    header, blobs = _objects.unpack(ANCHOR, data)
    own = programs.like, jax.eval_shape(programs.outer(programs.rate).init, programs.like)
    likes, structure = jax.tree.flatten(own)
    if header["leaves"] != [[str(like.dtype), list(like.shape)] for like in likes]:
        raise DamagedError("anchor of other parameters, or of another outer optimizer")
    pairs = zip(blobs, likes, strict=True)
    leaves = [np.frombuffer(blob, like.dtype).reshape(like.shape) for blob, like in pairs]
    params, state = jax.tree.unflatten(structure, leaves)
    return make_anchor(header["round"], params, state, header["expected"])


ANCHORS_KEPT = 2
"""Number of anchors in the store. The older one is a backup if the newest is damaged."""
PATIENCE = 100
"""Multiple of the deadline without a new object, after which a waiting island warns."""


def anchor_numbers() -> Steps[list[int]]:
    """Return the rounds of all anchors, in ascending order."""
    found = [_objects.number_of(key) for key in (yield List(_objects.ANCHORS))]
    return sorted({number for number in found if number is not None})


def newest_anchor(
    programs: Programs, after: int = -1
) -> Steps[tuple[Anchor | None, DamagedError | None]]:
    """Return the newest intact anchor after round `after`, and the error of a damaged newer one."""
    problem: DamagedError | None = None
    for number in reversed((yield from anchor_numbers())):
        if number <= after:
            break
        data = yield Read(_objects.anchor_key(number))
        try:
            if data is not None:
                return read_anchor(data, programs), problem
        except DamagedError as error:
            problem = error
    return None, problem


def later_anchor(
    programs: Programs, after: int, deadline: float, tell: Callable[[str], None]
) -> Steps[Anchor]:
    """Wait for an anchor after round `after`, which this island cannot compute.

    The wait has no limit. If the store gets no new objects, the island reports this by `tell`.
    """
    seen: set[str] = set()
    end = (yield Clock()) + PATIENCE * deadline
    while (found := (yield from newest_anchor(programs, after))[0]) is None:
        now = set((yield List(_objects.ROUNDS, _objects.round_folder(max(0, after))))) - seen
        if now:
            seen |= now
            end = (yield Clock()) + PATIENCE * deadline
        elif (yield Clock()) >= end:
            tell(
                f"waits for an anchor after round {after}, which it cannot compute, and the store "
                f"got no object in {PATIENCE * deadline:.0f} s; check that another island runs"
            )
        yield Wait(deadline / 4)
    return found


def enter_anchor(
    programs: Programs, first: Anchor, deadline: float, tell: Callable[[str], None]
) -> Steps[Anchor]:
    """Return the newest anchor of a run. In a new run, first write `first` as the anchor."""
    found, problem = yield from newest_anchor(programs)
    if found is None and problem is None:
        if (yield Read(_objects.manifest_key(0))) is None:
            data = yield from settle(_objects.anchor_key(0), first.to_bytes())
            found = read_anchor(data, programs)
        else:  # anchors were removed, or are not listed yet
            found = yield from later_anchor(programs, -1, deadline, tell)
    remedy = "pass the outer optimizer of the run, or use another folder."
    rule = "have an anchor that is intact and fits"
    check(found is not None, "Island(store)", rule, f"another ({problem})", remedy)
    assert found
    return found


def keep_anchor(anchor: Anchor, every: int) -> Steps[None]:
    """Write the anchor in every `every`-th round, and remove objects before the kept anchors.

    The island that wrote a manifest calls this function after it has obeyed the manifest. If it
    crashes first, a later round removes the objects. Manifests stay, so a round never closes twice.
    """
    if anchor.round % every:
        return
    yield Create(_objects.anchor_key(anchor.round), anchor.to_bytes())
    found = yield from anchor_numbers()
    before = found[-ANCHORS_KEPT:][0] if found else 0
    if old := tuple(_objects.anchor_key(number) for number in found if number < before):
        yield Delete(old)
    # List also the objects that the last removal should have removed, in case it failed.
    start = _objects.round_folder(max(0, before - (ANCHORS_KEPT + 1) * every))
    old = tuple(
        key
        for key in (yield List(_objects.ROUNDS, start))
        if (number := _objects.number_of(key)) is not None
        and number < before
        and key != _objects.manifest_key(number)
    )
    if old:
        yield Delete(old)


@dataclasses.dataclass(eq=False)
class Gathering:
    """Contributions to the open round that this island has seen."""

    anchor: Anchor
    settings: Settings
    named: Collection[Who] | None = None  # in the previous manifest; None if not obeyed here
    found: dict[Who, bytes] = dataclasses.field(default_factory=dict)
    handed: float = 0.0  # time of this island's contribution
    trained: float = 0.0  # seconds that this island's inner steps took
    begun: float | None = None  # time at which the first expected contribution was seen

    def hand_in(self, now: float, trained: float) -> None:
        """Record the time of this island's contribution, and wait for the other islands."""
        self.handed, self.trained, self.begun = now, trained, None

    @property
    def end(self) -> float:
        """Time at which this island closes the round, even if contributions are missing.

        The deadline counts from the first expected contribution, because inner steps may take
        longer than the deadline. If none comes, because all other islands may have crashed, the
        island waits as long as its own inner steps took, and then for the deadline.
        """
        begun = self.handed + self.trained if self.begun is None else self.begun
        return begun + self.settings.deadline

    def look(self, keys: Collection[str], own: Who) -> Steps[bool]:
        """Read new contributions to the open round; return True if the round can close."""
        for who in sorted(_objects.contributors(keys) - {own}):
            yield from self.read(who)
        here, now = {who.island for who in (own, *self.found)}, (yield Clock())
        expected = self.anchor.expected
        if self.begun is None and (not expected or here.intersection(expected)):
            self.begun = now
        if expected is None:
            return now >= self.end or len(here) >= self.settings.islands
        return now >= self.end or here >= set(expected)

    def read(self, who: Who) -> Steps[None]:
        """Read a contribution, unless an earlier call has read it."""
        if who in self.found:
            return
        data = yield Read(_objects.contribution_key(self.anchor.round, who))
        if data is not None:
            self.found[who] = data

    def late(self) -> Steps[list[str]]:
        """Return the islands whose contributions to the previous round are not in its manifest.

        If this island has not obeyed that manifest, the list is empty.
        """
        if self.named is None:
            return []
        keys = yield List(_objects.round_folder(self.anchor.round - 1))
        return [who.island for who in _objects.contributors(keys) - set(self.named)]


def manifest_of(
    gathering: Gathering,
    model: str,
    programs: Programs,
    by: Who,
    waited: float,
    late: Iterable[str] = (),
    alone: bool = False,
) -> Manifest | None:
    """Make the manifest of a round, or return None if this island may not write the manifest.

    If more contributions have another anchor, an island with that anchor must write the manifest.
    If none does in time, the caller passes `alone=True`, and this island writes the manifest. A
    round without a valid contribution keeps the parameters, but must close for the next to open.

    The next round waits for islands whose counted changes start from this round's anchor, for
    islands in `late`, and for islands with empty contributions. It does not wait for slower ones.
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
    newest = {who.island: who for who in checked}  # the last start of each, as `found` is sorted
    early = {who for who in checked if who != newest[who.island]}
    refused |= dict.fromkeys(early, "of an earlier start of its name")
    counted = [entry for who, entry in checked.items() if who not in early]
    norm = statistics.median_low([entry.norm for entry in counted if entry.norm] or [0.0])
    long = [entry for entry in counted if entry.norm > limit * norm]
    refused |= {e.who: f"norm {e.norm:.3g}, the median has {norm:.3g}" for e in long}
    counted = [entry for entry in counted if entry not in long]
    # An island that missed rounds has a large weight, which is clipped.
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
    number, base = anchor.round, contribution.base
    faults = (
        (contribution.who != who, f"says that it is of {contribution.who}"),
        (contribution.round != number, f"for round {contribution.round}"),
        (contribution.model != model, "of another model"),
        (contribution.fault, contribution.fault),
        (contribution.anchor != anchor.digest, f"holds another anchor, {contribution.anchor}"),
        (base > number, f"starts from round {base}, which is not there yet"),
        (number - base > stale, f"stale: starts from round {base}"),
    )
    for is_there, fault in faults:
        if is_there:
            raise DamagedError(fault)


def _norm(programs: Programs, contribution: Contribution) -> float:
    """Return the norm of a decoded contribution; raise `DamagedError` if the norm is not finite."""
    vectors = programs.decode(programs.from_bytes(contribution.blobs), contribution.round)
    squares = (np.dot(wide, wide) for wide in (v.astype(np.float64) for v in vectors))
    norm = math.sqrt(sum(map(float, squares)))
    if not math.isfinite(norm):
        raise DamagedError("not finite")
    return norm


def fetch(number: int, entry: Entry, mine: bytes | None, deadline: float) -> Steps[bytes | None]:
    """Read a contribution that a manifest lists; return None if the store no longer has it.

    `mine` are the bytes that this island already has. Other bytes may have counted.
    """
    end = (yield Clock()) + deadline
    data = mine
    while True:
        if not _is_named(data, entry):
            data = yield Read(_objects.contribution_key(number, entry.who))
        if data is not None and _is_named(data, entry):
            return data
        newer = yield from anchor_numbers()
        now = yield Clock()
        if (newer and newer[-1] > number) or now >= end:
            return None
        yield Wait(max(0.01, min(deadline / 10, end - now)))


def _is_named(data: bytes | None, entry: Entry) -> bool:
    return data is not None and _objects.digest(data) == entry.sha256
