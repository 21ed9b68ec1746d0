"""What a round leaves: who counted, whom the next waits for, what is kept, and what is removed."""

import jax
import numpy as np
from simulation import NESTEROV, PARAMS, SETTINGS, Actor, World, run

import fftgrad as fg
from fftgrad.islands import _objects, _round
from fftgrad.islands._model import Model, Programs
from fftgrad.islands._objects import Contribution, Entry, Manifest, Who
from fftgrad.islands._residual import Change, Ledger
from fftgrad.islands._round import Gathering
from fftgrad.islands._store import Clock, Wait

MODEL = Model.of(PARAMS)
PROGRAMS = Programs.of(MODEL, SETTINGS.exchange, NESTEROV, SETTINGS.rate)


def answered(steps, world):
    """What comes of steps in a world where nobody else is."""
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value
        world.now += request.seconds if isinstance(request, Wait) else 0.0
        answer = world.now if isinstance(request, Clock | Wait) else world.answer(request)


def anchor(number, expected=("a", "b", "c")):
    first = _round.first_anchor(PARAMS, PROGRAMS)
    return _round.make_anchor(number, first.params, first.outer, expected)


def contribution(who, before, base=None, scale=1.0):
    tree = {path: np.full(leaf.shape, scale, np.float32) for path, leaf in PARAMS.items()}
    payloads, *_ = PROGRAMS.compress(fg.NoMemory(), tree, (), PROGRAMS.init(), before.round, 0)
    return Contribution(
        who,
        round=before.round,
        base=before.round if base is None else base,
        anchor=before.digest,
        model=MODEL.digest,
        weight=1.0,
        loss=None,
        fault="",
        blobs=PROGRAMS.to_bytes(payloads),
    ).to_bytes()


def judged(before, found):
    gathering = Gathering(before, SETTINGS, found=found)
    return _round.manifest_of(gathering, MODEL.digest, PROGRAMS, Who("a", 1), 0.0)


def test_of_a_name_the_newest_start_counts():
    """Its earlier one handed in before it died."""
    before, starts = anchor(7), [Who("a", 1), Who("b", 2), Who("b", 3)]
    manifest = judged(before, {who: contribution(who, before) for who in starts})
    assert [entry.who for entry in manifest.counted] == [Who("a", 1), Who("b", 3)]
    ((name, start, reason),) = manifest.refused
    assert (name, start, reason) == ("b", 2, "of an earlier start of its name")


def test_a_slow_island_counts_and_is_not_waited_for():
    """Its change starts from the round before."""
    before, names = anchor(7), "abc"
    found = {Who(n, 1): contribution(Who(n, 1), before, 6 if n == "c" else 7) for n in names}
    manifest = judged(before, found)
    assert [entry.island for entry in manifest.counted] == ["a", "b", "c"]
    assert manifest.expected == ["a", "b"]


def store_of(rounds, anchors):
    """Two contributions and a manifest of each round, and some anchors."""
    world = World(0)
    keys = [_objects.anchor_key(number) for number in anchors]
    for number in range(rounds):
        keys += [_objects.contribution_key(number, Who(name, 1)) for name in "ab"]
        keys += [_objects.manifest_key(number)]
    for key in keys:
        world.objects[key], world.made[key] = b"", 0.0
    return world


def test_two_anchors_are_kept_and_all_that_goes_on_from_the_older_one():
    world = store_of(9, [0, 3, 6])
    answered(_round.keep_anchor(anchor(9), SETTINGS.anchors), world)
    kept = sorted(key for key in world.objects if key.startswith(_objects.ANCHORS))
    assert kept == [_objects.anchor_key(6), _objects.anchor_key(9)]
    rounds = {_objects.number_of(key) for key in world.objects if _objects.contributors([key])}
    assert rounds == {6, 7, 8}
    assert {_objects.manifest_key(number) for number in range(9)} <= world.objects.keys()


def entry_of(who, data):
    digest = _objects.digest(data)
    return Entry(*who, digest, 1.0, 3, None, 1.0)


def fetched(entry, mine, world):
    return answered(_round.fetch(3, entry, mine, 60.0), world)


def test_what_a_manifest_names_is_what_is_obeyed():
    """Neither what the island had read before, nor what is there by now, if that is other bytes."""
    who, world = Who("b", 1), World(0)
    entry, key = entry_of(who, b"right"), _objects.contribution_key(3, who)
    world.objects[key], world.made[key] = b"right", 0.0
    assert fetched(entry, None, world) == b"right"
    assert fetched(entry, b"wrong", world) == b"right"
    world.objects[key] = b"wrong"
    assert fetched(entry, b"right", world) == b"right"
    assert fetched(entry, None, world) is None


def test_islands_draw_differently():
    """Rounding by chance alike on all would not average out."""
    codec = fg.UniformQuantizer(bits=3)
    settings = fg.islands.Settings(fg.AllGather(codec), islands=2, deadline=60.0)
    rng = np.random.default_rng(0)
    tree = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in PARAMS.items()}

    class Alike(Actor):
        def change(self, _, base):
            return super().change(tree, base)

    world = World(67)
    run([Alike(world, name, 1, 10.0, settings=settings) for name in "ab"])
    keys = [_objects.contribution_key(0, Who(name, 1)) for name in "ab"]
    one, two = (bytes(Contribution.from_bytes(world.objects[key]).blobs[0]) for key in keys)
    assert len(one) == len(two)
    assert one != two


def stateful():
    """A ledger whose codec remembers, with a contribution that is pending."""
    programs = Programs.of(MODEL, fg.AllGather(fg.codecs.AdaComp(bin_size=4)))
    rng = np.random.default_rng(0)
    tree = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in PARAMS.items()}
    ledger, change = Ledger(fg.ErrorFeedback(), MODEL), Change(tree, 3, 1.0, None)
    _, pending = ledger.compress(programs, change, 3, 1)
    ledger.hand_in(pending, change)
    return ledger, pending


def closed(counted):
    data = b""
    entries = [entry_of(Who("a", 1), data)] if counted else []
    return Manifest(3, Who("b", 1), "", entries, [], [], [], 0.0)


def same(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_codec_remembers_what_counted_and_not_what_came_too_late():
    ledger, pending = stateful()
    assert jax.tree.leaves(pending.states)
    ledger.resolve(closed(counted=True), Who("a", 1))
    assert same(ledger._book.states, pending.states)
    ledger, _ = stateful()
    ledger.resolve(closed(counted=False), Who("a", 1))
    fate = ledger.outcomes[-1]
    assert (fate.counted, fate.kept, fate.reason) == (False, True, "late")
    assert ledger._book.states is None
