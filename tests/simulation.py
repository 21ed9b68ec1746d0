"""Islands on a simulated store: time, delays, crashes and lost answers by a seed.

An island is a `Member` whose requests are answered one at a time, in the order of a clock of the
world. At each request it may die, before or after the effect; an answer may be lost, an error take
its place, and a listing lag behind. Clocks of islands are off by hours.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fftgrad as fg
from fftgrad.islands import _objects
from fftgrad.islands._member import Member
from fftgrad.islands._model import Model
from fftgrad.islands._objects import Contribution, Manifest
from fftgrad.islands._residual import Change
from fftgrad.islands._store import Clock, Create, Delete, List, Read, StoreError, Wait

PARAMS = {"b": np.zeros(3, np.float32), "w": np.zeros((4, 4), np.float32)}
CODEC = fg.chain(fg.TopK(fraction=0.3), fg.LogQuantizer(bits=5))
SETTINGS = fg.islands.Settings(fg.AllGather(CODEC), islands=3, deadline=60.0, anchors=3, stale=2)


@dataclasses.dataclass
class Faults:
    """How often what goes wrong, at each request."""

    dies: float = 0.0
    errs: float = 0.0
    lag: float = 0.0  # seconds until an object is listed, at most
    cuts: float = 0.0  # how often a contribution is damaged when it is made


class World:
    """A store, and a clock that nobody sees."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.random, self.faults = random.Random(seed), faults or Faults()
        self.now = 0.0
        self.objects: dict[str, bytes] = {}
        self.made: dict[str, float] = {}  # when an object can be listed
        self.removed: dict[str, bytes] = {}

    def answer(self, request: Any) -> Any:
        if isinstance(request, Create):
            if request.key in self.objects:
                return False
            assert request.key not in self.removed or "/manifest" not in request.key
            is_contribution = bool(_objects.contributors([request.key]))
            cut = is_contribution and self.random.random() < self.faults.cuts
            self.objects[request.key] = request.data[:-9] if cut else request.data
            self.made[request.key] = self.now + self.random.uniform(0, self.faults.lag)
            return True
        if isinstance(request, Read):
            return self.objects.get(request.key)
        if isinstance(request, List):
            return [
                key
                for key in self.objects
                if key.startswith(request.folder)
                and key > request.after
                and self.made[key] <= self.now
            ]
        assert isinstance(request, Delete)
        for key in request.keys:
            if key in self.objects:
                self.removed[key] = self.objects.pop(key)
        return None

    def ever(self, key: str) -> bytes:
        """An object, be it removed by now."""
        return self.objects[key] if key in self.objects else self.removed[key]

    def manifests(self) -> list[Manifest]:
        """Those that decide the rounds."""
        found: list[Manifest] = []
        while (data := self.objects.get(_objects.manifest_key(len(found)))) is not None:
            found.append(Manifest.from_bytes(data, len(found)))
        return found


class Actor:
    """One start of an island, and what its program does."""

    spread = 0.5  # of the pace

    def __init__(self, world: World, name: str, rounds: int, pace: float, **options: Any) -> None:
        self.world, self.name, self.rounds, self.pace = world, name, rounds, pace
        model = Model.of(PARAMS)
        options = {"outer": fg.islands.nesterov, "memory": fg.ErrorFeedback()} | options
        settings = options.pop("settings", SETTINGS)
        self.member = Member(name, model, settings=settings, **options)
        self.ready = world.now + world.random.uniform(0, 5)
        self.offset = world.random.uniform(-1e4, 1e4)
        self.changes: list[Change] = []
        self.dead = self.done = False
        self.failure: Exception | None = None
        self.digests: dict[int, str] = {}
        self.stopped = 0.0  # the longest time that a meeting took
        self._life = self._live()
        self._answer: Any = None
        self._error: Exception | None = None
        self._postponed: Any = None

    def spoiled(self, request: Any) -> Any:
        """What it asks in place of what it should."""
        return request

    def postpones(self, request: Any) -> float:
        """By how many seconds it is late with a request."""
        return 0.0

    def _live(self) -> Iterator[Any]:
        """All that it does, as requests."""
        member, random = self.member, self.world.random
        yield from self._again(lambda: member.start(PARAMS))
        for _ in range(self.rounds):
            yield Wait(
                self.pace * random.uniform(1 - self.spread, 1 + self.spread)
            )  # its inner steps
            rng = np.random.default_rng(random.getrandbits(32))
            tree = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in PARAMS.items()}
            change = self.change(tree, member.anchor.round)
            self.changes.append(change)
            start = self.world.now
            yield from self._again(lambda: member.hand_in(change))  # noqa: B023 (run at once)
            self.stopped = max(self.stopped, self.world.now - start)
        yield Wait(1e6)  # long enough for all the others
        yield from self._again(member.catch_up)
        self.note()

    def change(self, tree: Any, base: int) -> Change:
        return Change(tree, base, 1.0, 0.5)

    def _again(self, steps: Callable[[], Any]) -> Iterator[Any]:
        """As the thread of an island does: until the store does not fail."""
        while True:
            try:
                return (yield from steps())
            except StoreError:
                yield Wait(5.0)

    def note(self) -> None:
        """What it holds, by round."""
        anchor = getattr(self.member, "anchor", None)
        if anchor is not None:
            assert self.digests.setdefault(anchor.round, anchor.digest) == anchor.digest

    def turn(self) -> None:
        """One request, and what comes of it."""
        world, faults = self.world, self.world.faults
        world.now = self.ready
        try:
            self.note()
            if self._postponed is not None:
                request, self._postponed = self._postponed, None
            elif self._error is None:
                request = self.spoiled(self._life.send(self._answer))
                if postponed := self.postpones(request):
                    self.ready, self._postponed = self.ready + postponed, request
                    return
            else:
                error, self._error = self._error, None
                request = self._life.throw(error)
        except StopIteration:
            self.done = True
            return
        except (ValueError, RuntimeError) as error:
            self.failure, self.done = error, True
            return
        if isinstance(request, Wait):
            self._answer, self.ready = None, self.ready + request.seconds
            return
        if isinstance(request, Clock):
            self._answer = world.now + self.offset
            return
        chance = world.random.random()
        if chance < faults.dies / 2:
            self.dead = True
            return
        self.ready += world.random.uniform(0.01, 1.0)
        if faults.dies <= chance < faults.dies + faults.errs / 2:
            self._error = StoreError("the request was lost")
            return
        self._answer = world.answer(request)
        self.note()
        if chance < faults.dies:
            self.dead = True
        elif chance < faults.dies + faults.errs:
            self._error = StoreError("the answer was lost")

    # The law

    def learned(self) -> Any:
        """What it handed in, and had to be counted or kept."""
        fates = self.member.ledger.outcomes + [None] * len(self.changes)
        taken = [
            change
            for change, fate in zip(self.changes, fates, strict=False)
            if fate is not None and (fate.counted or fate.kept)
        ]
        return total([change.tree for change in taken])

    def counted(self) -> Any:
        """What the manifests counted of it, as everyone decodes it."""
        found: list[Any] = []
        for manifest in self.world.manifests():
            for entry in manifest.counted:
                if entry.who == self.member.who:
                    data = self.world.ever(_objects.contribution_key(manifest.round, entry.who))
                    found.append(self.decoded(data, manifest.round))
        return total(found)

    def decoded(self, data: bytes, number: int) -> Any:
        programs = self.member.programs
        payloads = programs.from_bytes(Contribution.from_bytes(data).blobs)
        (vector,) = programs.decode(payloads, number)
        b, w = vector[:3], vector[3:]
        return {"b": b, "w": w.reshape(4, 4)}

    def check_law(self) -> None:
        """What was applied + what its memory holds = what it learned."""
        held = total([self.counted(), self.member.ledger.residual])
        learned = self.learned()
        for path in PARAMS:
            np.testing.assert_allclose(held[path], learned[path], atol=1e-4)


class Steady(Actor):
    """Whose inner steps take about as long each time."""

    spread = 0.01


class Mortal(Steady):
    """It dies in its inner steps from round `within`, or once it has handed in to round `after`."""

    def __init__(self, *args: Any, within: int = -1, after: int = -1, **options: Any) -> None:
        super().__init__(*args, **options)
        self.within, self.after = within, after

    def change(self, tree: Any, base: int) -> Change:
        self.dead = base == self.within
        return super().change(tree, base)

    def turn(self) -> None:
        super().turn()
        folder = "" if self.after < 0 else _objects.round_folder(self.after)
        self.dead |= bool(folder) and any(
            key.startswith(f"{folder}{self.name}.") for key in self.world.objects
        )


def total(trees: list[Any]) -> Any:
    zero = {path: np.zeros(leaf.shape, np.float64) for path, leaf in PARAMS.items()}
    return {path: sum((tree[path] for tree in trees), zero[path]) for path in PARAMS}


def nobody(_: Actor) -> None:
    """Who died stays dead."""


def run(actors: list[Actor], revive: Callable[[Actor], Actor | None] = nobody) -> list[Actor]:
    """Until all are over. Who died may come back as another actor. All that there ever were."""
    everyone = list(actors)
    while actors:
        actor = min(actors, key=lambda actor: actor.ready)
        actor.turn()
        if actor.dead or actor.done:
            actors.remove(actor)
            again = revive(actor) if actor.dead else None
            if again is not None:
                actors.append(again)
                everyone.append(again)
    return everyone


def same_bits(everyone: list[Actor]) -> dict[int, str]:
    """The digests by round, which are the same on all that ever were there."""
    found: dict[int, str] = {}
    for actor in everyone:
        for number, digest in actor.digests.items():
            assert found.setdefault(number, digest) == digest, (actor.name, number)
    return found


def lawful(everyone: list[Actor]) -> dict[int, str]:
    """The same, of which none has failed, and each has what it learned."""
    found = same_bits(everyone)
    for actor in everyone:
        assert actor.failure is None, actor.failure
        actor.check_law()
    return found
