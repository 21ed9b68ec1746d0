"""A start that takes up what an earlier one had not sent counts nothing twice, whatever happens."""

import numpy as np
import pytest
from simulation import PARAMS, Steady, World, run, same_bits, total

from fftgrad.islands import _objects, _run


class Dies(Steady):
    """It dies once it has written its contribution to round `last`; `saved` is its checkpoint."""

    last = 1
    saved = None

    @property
    def has_written(self):
        return _objects.contribution_key(self.last, self.member.who) in self.world.objects

    def is_due(self):
        """Whether its program saves it now."""
        return self.has_written

    def note(self):
        super().note()
        member = self.member
        if member.who.incarnation and member.anchor.round == self.last and self.is_due():
            self.saved = member.ledger.saved(member.who, member.sent, member.run)

    def turn(self):
        super().turn()
        self.dead |= self.member.who.incarnation > 0 and self.has_written


class DiesAfterItsCheckpoint(Dies):
    last = 2

    def is_due(self):
        return self.member.ledger.pending is None


def counted(world, actor):
    """What the manifests count of all starts of a name."""
    return total(
        [
            actor.decoded(
                world.ever(_objects.contribution_key(manifest.round, entry.who)), manifest.round
            )
            for manifest in world.manifests()
            for entry in manifest.counted
            if entry.island == actor.name
        ]
    )


def check_law(world, dead, back):
    """All that two starts learned was counted or is kept, but for what the first took with it."""
    pending = dead.member.ledger.pending
    lost = pending.memory.residual if back.took_up_nothing else total([])
    changes = [change.tree for change in (*dead.changes, *back.changes)]
    have = total([counted(world, back), back.member.ledger.residual, lost])
    learned = total(changes)
    for path in PARAMS:
        np.testing.assert_allclose(have[path], learned[path], atol=1e-4)


def test_a_contribution_that_counted_after_its_island_died_is_not_sent_again():
    world = World(70)
    dead = Dies(world, "c", 9, 10.0)
    others = [Steady(world, name, 9, 30.0) for name in "ab"]
    live, back = [dead, *others], None
    while live:
        actor = min(live, key=lambda actor: actor.ready)
        actor.turn()
        if actor.dead or actor.done:
            live.remove(actor)
        passed = all(getattr(one.member, "gathering", None) for one in others) and all(
            one.member.anchor.round >= 3 for one in others
        )
        if back is None and dead.dead and passed:
            back = Steady(world, "c", 2, 30.0, residual=dead.saved)
            back.took_up_nothing = False
            live.append(back)
    assert back.failure is None
    same_bits([dead, *others, back])
    assert [
        one.round
        for one in world.manifests()
        if dead.member.who in [entry.who for entry in one.counted]
    ] == [0, 1]
    check_law(world, dead, back)


def test_what_is_in_the_open_round_already_is_not_sent_again():
    """The checkpoint is older than the last contribution, which only counts after the restart."""

    world = World(71)
    dead = DiesAfterItsCheckpoint(world, "c", 9, 10.0)
    others = [Steady(world, name, 9, 200.0) for name in "ab"]
    again = []

    def revive(actor):
        if actor is not dead:
            return None
        again.append(Steady(world, "c", 2, 150.0, residual=dead.saved))
        again[0].took_up_nothing = True
        return again[0]

    with pytest.warns(UserWarning, match="round 2 counts it again"):
        same_bits(run([dead, *others], revive))
    assert again[0].failure is None
    check_law(world, dead, again[0])


def test_a_bit_of_the_runs_object_ends_nobodys_run():
    """Nor one of the number of its format, which is read before the checksum by who starts."""
    data = _objects.pack_json({"id": "0", "model": [], "settings": {}})

    def said(found):
        steps = _run.check_run(data)
        next(steps)
        with pytest.raises(StopIteration) as end:
            steps.send(found)
        return end.value.value

    assert said(data) == ""
    for at in range(len(data)):
        for bit in range(8):
            flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            assert "run.json is damaged" in said(flipped), flipped
