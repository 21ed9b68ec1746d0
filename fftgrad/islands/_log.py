"""The log of a run: a manifest decides each round, and anchors hold what all have before one.

A store creates an object only if there is none, so all readers of the log find the same manifest.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fftgrad._contracts import Like, PyTree
from fftgrad.exchanges._parts import Payloads
from fftgrad.islands import _keys, _objects
from fftgrad.islands._model import Array, Model, Outer, Programs, Tree, on_host
from fftgrad.islands._objects import DamagedError, Manifest
from fftgrad.islands._requests import Clock, Create, Delete, List, Read, Steps, Wait, settle
from fftgrad.islands._settings import Settings


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
            "digest": self.digest,
            "leaves": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
        }
        blobs = [np.ascontiguousarray(leaf).tobytes() for leaf in leaves]
        return _objects.pack(ANCHOR, header, blobs)


def make(number: int, params: Tree, outer: PyTree, expected: Sequence[str] | None) -> Anchor:
    """The anchor of a round, with its digest."""
    names = None if expected is None else tuple(expected)
    total = zlib.crc32(repr((number, names)).encode())
    for leaf in jax.tree.leaves((params, outer)):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return Anchor(number, params, outer, names, f"{total:08x}")


def first(params: Tree, outer: Outer, settings: Settings) -> Anchor:
    """The anchor of a run that begins with these parameters."""
    with on_host():
        state = jax.device_get(outer(settings.rate).init(params))
    return make(0, params, jax.tree.map(np.asarray, state), None)


def after(
    before: Anchor,
    manifest: Manifest,
    sent: Sequence[list[Payloads]],
    programs: Programs,
    outer: Outer,
    rate: float,
) -> Anchor:
    """The anchor after a round: the outer step on the contributions of its manifest."""
    state = before.params, before.outer
    if sent:
        state = programs.advance(outer, rate, state, sent, manifest.shares, manifest.round)
    return make(before.round + 1, *state, manifest.expected)


class Reader:
    """Reads the anchors of a model and an outer optimizer."""

    def __init__(self, model: Model, outer: Outer) -> None:
        state = jax.eval_shape(outer(1.0).init, model.likes)  # its shapes are those of any rate
        likes, self._structure = jax.tree.flatten((model.likes, state))
        self._likes: list[Like] = likes

    def read(self, data: bytes) -> Anchor:
        """The anchor of an object; a `DamagedError` if it is none, or one of other shapes."""
        header, blobs = _objects.unpack(ANCHOR, data)
        try:
            number, expected = int(header["round"]), header["expected"]
            told, digest = header["leaves"], header["digest"]
        except (KeyError, TypeError) as error:
            raise DamagedError(f"anchor without {error}") from None
        if told != [[str(like.dtype), list(like.shape)] for like in self._likes]:
            raise DamagedError("anchor of other parameters, or of another outer optimizer")
        try:
            pairs = zip(blobs, self._likes, strict=True)
            leaves = [np.frombuffer(blob, like.dtype).reshape(like.shape) for blob, like in pairs]
        except ValueError:
            raise DamagedError("anchor of other sizes than it says") from None
        params, state = jax.tree.unflatten(self._structure, leaves)
        found = make(number, params, state, expected)
        if found.digest != digest:
            raise DamagedError("anchor with another digest than it says")
        return found


ANCHORS_KEPT = 2
"""The newest anchor, and one to go back to if that is damaged."""
PATIENCE = 100
"""Deadlines without a new object after which an island says that it waits."""


def numbers() -> Steps[list[int]]:
    """The rounds of all anchors, in ascending order."""
    found = [_keys.number_of(key) for key in (yield List(_keys.ANCHORS))]
    return sorted({number for number in found if number is not None})


def newest(reader: Reader, after: int = -1) -> Steps[tuple[Anchor | None, DamagedError | None]]:
    """The newest whole anchor after a round, and the damage of the last one passed over."""
    problem: DamagedError | None = None
    for number in reversed((yield from numbers())):
        if number <= after:
            break
        data = yield Read(_keys.anchor(number))
        try:
            if data is not None:
                return reader.read(data), problem
        except DamagedError as error:
            problem = error
    return None, problem


def later(
    reader: Reader,
    after: int,
    deadline: float,
    tell: Callable[[str], None],
) -> Steps[Anchor]:
    """Wait for an anchor after a round, for an island that cannot compute it.

    It waits however long rounds take, and tells if no object comes to the store.
    """
    seen: set[str] = set()
    end = (yield Clock()) + PATIENCE * deadline
    while (found := (yield from newest(reader, after))[0]) is None:
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


def enter(
    reader: Reader, first: Anchor, deadline: float, tell: Callable[[str], None]
) -> Steps[Anchor]:
    """The newest anchor of a run. A run without one begins with `first`."""
    found, problem = yield from newest(reader)
    if found is None and problem is None:
        if (yield Read(_keys.manifest(0))) is None:
            data = yield from settle(_keys.anchor(0), first.to_bytes())
            found = reader.read(data)
        else:  # removed, or not listed yet
            found = yield from later(reader, -1, deadline, tell)
    if found is None:
        raise ValueError(
            f"Island(store): must have an anchor that is whole, got one that is not, or does "
            f"not fit ({problem}); take another folder, or the outer optimizer of the run."
        )
    return found


def keep(anchor: Anchor, every: int) -> Steps[None]:
    """Write every so many rounds the anchor, and remove what is older than the two newest.

    The writer of a manifest does so after it has obeyed it. If it dies before, a later round makes
    up for it. Manifests stay: a round that has one is never closed again.
    """
    if anchor.round % every:
        return
    yield Create(_keys.anchor(anchor.round), anchor.to_bytes())
    found = yield from numbers()
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
