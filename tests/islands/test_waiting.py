"""Who waits for whom, and for how long."""

import dataclasses

from simulation import SETTINGS, Actor, Faults, Mortal, Steady, World, run, same_bits

from fftgrad.islands import _keys, _log
from fftgrad.islands._requests import Create


def ends(_):
    return None


class Leaves(Steady):
    """It leaves in an orderly way, as soon as it has nothing to wait for."""

    def _live(self):
        lives = super()._live()
        answer = None
        while True:
            request = lives.send(answer)
            if len(self.member.ledger.outcomes) == self.rounds:
                break
            answer = yield request
        yield from self.member.leave()


def test_nobody_waits_for_who_has_left():
    """It counted in the round before, and would be expected."""
    world = World(60)
    everyone = [Steady(world, name, 8, 10.0) for name in "ab"]
    leaver = Leaves(world, "c", 4, 10.0)
    run([*everyone, leaver], ends)
    same_bits([*everyone, leaver])
    manifests = world.manifests()
    assert len(manifests) == 8
    assert [len(manifest.counted) for manifest in manifests] == [3] * 4 + [2] * 4
    assert manifests[4].missed == []
    assert manifests[4].waited < SETTINGS.deadline / 2
    assert max(actor.stopped for actor in everyone) < SETTINGS.deadline


def test_who_left_and_is_back_is_waited_for():
    """By its next start, whatever the one before said."""
    world = World(61)
    everyone = [Steady(world, name, 12, 30.0) for name in "ab"]
    leaver = Leaves(world, "c", 3, 30.0)
    back = Steady(world, "c", 4, 30.0)
    back.ready = 125.0
    run([*everyone, leaver, back], ends)
    same_bits([*everyone, leaver, back])
    assert back.failure is None, back.failure
    counted = [{entry.island for entry in manifest.counted} for manifest in world.manifests()]
    assert counted[:3] == [{"a", "b", "c"}] * 3
    since = [number for number, names in enumerate(counted) if number > 2 and "c" in names]
    assert since
    assert any("c" in manifest.expected for manifest in world.manifests()[since[0] :])
    assert all(o.counted or o.kept for o in back.member.ledger.outcomes)


class Otherwise(Steady):
    """Who holds other bits from round 1 on."""

    def change(self, tree, base):
        anchor = self.member.anchor
        if base == 1 and len(self.changes) < 2:
            other = anchor.params | {"w": anchor.params["w"] + 1}
            self.member.anchor = _log.make(1, other, anchor.outer, anchor.expected)
        return super().change(tree, base)

    def note(self):
        anchor = getattr(self.member, "anchor", None)
        if anchor is None or anchor.round != 1 or anchor.digest == self.digests.get(1):
            super().note()


def test_rounds_may_be_longer_than_a_hundred_deadlines():
    """For who waits for an anchor, too: nothing comes to the store in between."""
    world = World(62)
    settings = dataclasses.replace(SETTINGS, anchors=4)
    long = 150 * SETTINGS.deadline
    actors = [Steady(world, name, 7, long, settings=settings) for name in "ab"]
    other = Otherwise(world, "c", 3, long, settings=settings)
    for actor in (*actors, other):
        actor.spread = 0.001
    everyone = run([*actors, other], ends)
    same_bits(everyone)
    assert other.failure is None, other.failure
    assert other.member.ledger.outcomes[-1].counted
    assert max(other.digests) == max(actors[0].digests)


def test_who_waits_for_an_anchor_that_nobody_writes_says_so():
    world = World(63)

    class Tells(Otherwise):
        def note(self):
            super().note()
            self.dead = "waits for an anchor after round 1" in self.member.trouble

    other = Tells(world, "c", 3, 10.0)
    run([Mortal(world, "a", 5, 10.0, within=2), Mortal(world, "b", 5, 10.0, within=2), other], ends)
    assert other.dead
    assert "nothing came to the store in 6000 s" in other.member.trouble


def test_a_round_that_most_who_came_hold_otherwise_is_closed_by_who_is_left():
    """It finds out what is right from the store, and need not take anybody's word for it."""
    world = World(12)

    left = Otherwise(world, "c", 4, 60.0)
    dead = [Mortal(world, name, 3, 10.0, after=1) for name in "ab"]
    run([*dead, left], ends)
    same_bits([*dead, left])
    assert left.failure is None, left.failure
    assert len(world.manifests()) == 4
    assert [entry.island for entry in world.manifests()[1].counted] == ["a", "b"]
    ((name, _, reason),) = world.manifests()[1].refused
    assert (name, "holds another anchor" in reason) == ("c", True)
    assert [o.counted for o in left.member.ledger.outcomes] == [True, False, True, True]


def test_a_round_that_nobody_can_close_otherwise_is_closed_by_who_was_right():
    """Most who came held other bits, and died."""
    world = World(64)

    class Wrong(Otherwise):
        def turn(self):
            super().turn()
            mine = [o for o in world.objects if o.startswith(f"rounds/000000001/{self.name}.")]
            self.dead = self.dead or bool(mine)

    wrong = [Wrong(world, name, 3, 10.0) for name in "ab"]
    left = Actor(world, "c", 4, 60.0)
    run([*wrong, left], ends)
    assert left.failure is None, left.failure
    assert [entry.island for entry in world.manifests()[1].counted] == ["c"]
    assert {refusal.island for refusal in world.manifests()[1].refused} == {"a", "b"}
    assert [o.counted for o in left.member.ledger.outcomes] == [True] * 4
    left.check_law()


def test_what_leaving_costs_is_one_object():
    world = World(66, Faults())
    made = []

    class Counts(Leaves):
        def spoiled(self, request):
            if isinstance(request, Create):
                made.append(request.key)
            return request

    run([Counts(world, "a", 2, 10.0, settings=dataclasses.replace(SETTINGS, islands=1))], ends)
    who = _keys.Who("a", 1)
    assert made[-1] == _keys.left(2, who)
    assert _keys.contributors(made) == {who}
