"""Who waits for whom, and for how long."""

import dataclasses

from simulation import SETTINGS, Actor, Mortal, Steady, World, run, same_bits

from fftgrad.islands import _round


class Otherwise(Steady):
    """Who holds other bits from round 1 on."""

    def change(self, tree, base):
        anchor = self.member.anchor
        if base == 1 and len(self.changes) < 2:
            other = anchor.params | {"w": anchor.params["w"] + 1}
            self.member.anchor = _round.make_anchor(1, other, anchor.outer, anchor.expected)
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
    everyone = run([*actors, other])
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
    run([Mortal(world, "a", 5, 10.0, within=2), Mortal(world, "b", 5, 10.0, within=2), other])
    assert other.dead
    assert "the store got no object in 6000 s" in other.member.trouble


def test_a_round_that_most_who_came_hold_otherwise_is_closed_by_who_is_left():
    """It finds out what is right from the store, and need not take anybody's word for it."""
    world = World(12)

    left = Otherwise(world, "c", 4, 60.0)
    dead = [Mortal(world, name, 3, 10.0, after=1) for name in "ab"]
    run([*dead, left])
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
    run([*wrong, left])
    assert left.failure is None, left.failure
    assert [entry.island for entry in world.manifests()[1].counted] == ["c"]
    assert {refusal.island for refusal in world.manifests()[1].refused} == {"a", "b"}
    assert [o.counted for o in left.member.ledger.outcomes] == [True] * 4
    left.check_law()
