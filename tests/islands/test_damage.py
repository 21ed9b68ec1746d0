"""What is damaged in the store ends nobody's run, and is named."""

import dataclasses

import numpy as np
import pytest
from simulation import PARAMS, SETTINGS, Actor, World, lawful, run, same_bits

from fftgrad.islands import _objects
from fftgrad.islands._store import StoreError


def cut(data):
    return data[:-9]


class Damages(Actor):
    """After its third change the manifest of round 1, which it has obeyed, is damaged."""

    whole = b""

    def note(self):
        super().note()
        if len(self.changes) > 2 and self.world.objects.get(_objects.manifest_key(1)):
            self.whole = self.world.objects[_objects.manifest_key(1)]
            self.world.objects[_objects.manifest_key(1)] = b""


class Slow(Actor):
    """It looks into round 1 late: at all, or once it has `written` its contribution."""

    waited = False

    def __init__(self, *args, written):
        super().__init__(*args)
        self.written = written

    def postpones(self, request):
        key = _objects.contribution_key(1, self.member.who)
        looks = getattr(request, "folder", "") == _objects.round_folder(1)
        if self.waited or not looks or (self.written and key not in self.world.objects):
            return 0.0
        self.waited = True
        return 300.0


SPARE = dataclasses.replace(SETTINGS, anchors=6)


def test_who_joins_passes_a_damaged_manifest_by_an_anchor():
    """The others obeyed it when it was whole."""
    world = World(51)
    others = [Damages(world, name, 10, 30.0, settings=SPARE) for name in "ab"]
    joiner = Actor(world, "c", 4, 30.0, settings=SPARE)
    joiner.ready = 170.0
    with pytest.warns(UserWarning, match="rounds/000000001/manifest.json is damaged"):
        everyone = run([*others, joiner])
    world.objects[_objects.manifest_key(1)] = others[0].whole or others[1].whole
    lawful(everyone)
    assert sorted(joiner.digests)[:3] == [0, 1, SPARE.anchors]
    assert sum(outcome.counted for outcome in joiner.member.ledger.outcomes) == 4


def test_a_contribution_in_a_round_that_was_passed_by_an_anchor_is_not_sent_twice():
    """Its manifest is damaged, and nobody can say whether it counted."""
    world = World(53)

    late = Slow(world, "c", 6, 10.0, written=True)
    everyone = run([Damages(world, "a", 20, 10.0), Damages(world, "b", 20, 10.0), late])
    same_bits(everyone)
    assert late.failure is None, late.failure
    fate = next(o for o in late.member.ledger.outcomes if o.round == 1)
    assert "rounds/000000001/manifest.json is damaged" in fate.reason
    assert (fate.counted, fate.kept) == (False, False)
    assert late.member.ledger.outcomes[-1].counted


def test_a_contribution_that_was_damaged_and_whose_answer_was_lost_is_no_other_islands():
    world = World(60)

    class Unlucky(Actor):
        lost = False

        def turn(self):
            super().turn()
            key = _objects.contribution_key(1, self.member.who)
            if not self.lost and key in world.objects:
                self.lost, world.objects[key] = True, cut(world.objects[key])
                self._error = StoreError("the answer was lost")

    actors = [Actor(world, "a", 5, 10.0), Actor(world, "b", 5, 10.0), Unlucky(world, "c", 5, 10.0)]
    lawful(run(actors))
    ((name, _, reason),) = world.manifests()[1].refused
    assert (name, reason) == ("c", "altered, or cut off")


def test_a_damaged_run_is_told_to_who_starts_and_ends_nobody():
    world, told = World(54), {}

    class Damages(Actor):
        def note(self):
            super().note()
            told.setdefault(self.name, set()).add(self.member.trouble)
            if len(self.changes) == 2:
                world.objects[_objects.RUN] = self.member.run.replace(b"0.7", b"0.8")

    everyone = run([Damages(world, name, 5, 10.0) for name in "abc"])
    same_bits(everyone)
    for actor in everyone:
        assert actor.failure is None, actor.failure
        assert [outcome.counted for outcome in actor.member.ledger.outcomes] == [True] * 5
        assert any(
            "run.json is damaged (altered), so no island can join" in t for t in told[actor.name]
        )
    (late,) = run([Actor(world, "d", 1, 10.0)])
    assert "must have an intact run.json, got damage (altered)" in str(late.failure)


def test_an_anchor_that_is_damaged_is_passed_over_for_the_one_before():
    """Two are kept for that."""
    world = World(57)
    everyone = run([Actor(world, name, 9, 10.0) for name in "abc"])
    kept = sorted(key for key in world.objects if key.startswith(_objects.ANCHORS))
    assert kept == [_objects.anchor_key(6), _objects.anchor_key(9)]
    world.objects[kept[-1]] = cut(world.objects[kept[-1]])
    (joiner,) = run([Actor(world, "d", 2, 10.0)])
    digests = same_bits([*everyone, joiner])
    assert joiner.failure is None, joiner.failure
    assert min(joiner.digests) == 6
    assert joiner.digests[9] == digests[9]


def test_a_manifest_that_names_what_was_altered_since_is_not_obeyed_with_it():
    """Who had not read it waits for the anchor of those who had."""
    world = World(58)

    class Damages(Actor):
        damaged = False

        def note(self):
            super().note()
            if len(self.changes) > 2:
                key = _objects.contribution_key(1, self.member.who)
                values = np.frombuffer(world.ever(key), np.uint8).copy()
                values[-20] ^= 1
                if key in world.objects and not self.damaged:
                    self.damaged, world.objects[key] = True, values.tobytes()

    damages = [Damages(world, name, 15, 10.0) for name in "ab"]
    slow = Slow(world, "c", 5, 10.0, written=False)
    same_bits(run([*damages, slow]))
    assert slow.failure is None, slow.failure
    assert 2 not in slow.digests
    assert all(np.isfinite(slow.member.anchor.params[path]).all() for path in PARAMS)
