"""Islands on a simulated store, at whose every request they may die: the heart of the proof."""

import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from simulation import (
    PARAMS,
    SETTINGS,
    Actor,
    Faults,
    Mortal,
    Steady,
    World,
    lawful,
    run,
    same_bits,
)

import fftgrad as fg
from fftgrad.islands import _objects
from fftgrad.islands._objects import Contribution
from fftgrad.islands._store import Create


def test_three_islands_hold_the_same_bits_and_lose_nothing():
    world = World(0)
    everyone = run([Actor(world, name, 6, 10.0) for name in "abc"])
    assert set(lawful(everyone)) == set(range(7))
    for actor in everyone:
        assert [outcome.counted for outcome in actor.member.ledger.outcomes] == [True] * 6


def lives(seed, faults, lives=6):
    """Three islands, the last of which is slow; those that die come back, so often in all."""
    world = World(seed, faults)
    left = [lives]

    def revive(actor):
        if not left[0] or world.now > 1e5:
            world.faults.dies = 0.0
            return None
        left[0] -= 1
        again = Actor(world, actor.name, 6, actor.pace)
        again.ready += world.random.uniform(0, 200)
        return again

    paces = {"a": 10.0, "b": 10.0, "c": 25.0}
    everyone = run([Actor(world, name, 8, pace) for name, pace in paces.items()], revive)
    digests = same_bits(everyone)
    assert max(digests) == len(world.manifests())
    for actor in everyone:
        assert actor.failure is None, actor.failure
        if not actor.dead:
            actor.check_law()
            assert actor.digests[max(digests)] == digests[max(digests)]
    return world, everyone


FAULTS = {
    "few": {"dies": 0.01, "errs": 0.02, "lag": 3.0},
    "many, and listings later than the deadline": {"dies": 0.05, "errs": 0.2, "lag": 100.0},
    "some, and contributions that are cut": {"dies": 0.02, "errs": 0.05, "lag": 3.0, "cuts": 0.1},
}


@pytest.mark.parametrize("faults", FAULTS)
@hypothesis.settings(max_examples=6)
@hypothesis.given(st.integers(0, 2**32))
def test_a_crash_at_any_request_leaves_the_old_round_or_the_new_one(faults, seed):
    """They come back under their names. All that lived through a round hold its bits."""
    lives(seed, Faults(**FAULTS[faults]))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 600, 100))
@pytest.mark.parametrize("faults", FAULTS)
def test_of_many_crashes(faults, first):
    for seed in range(first, first + 100):
        lives(seed, Faults(**FAULTS[faults]), 30)


def test_of_long_rounds_a_slow_island_counts_in_some_and_closes_none_alone():
    world = World(41)
    paces = {"a": 600.0, "b": 603.0, "c": 1000.0}
    everyone = run([Steady(world, name, 9, pace) for name, pace in paces.items()])
    same_bits(everyone)
    counted = [{entry.island for entry in manifest.counted} for manifest in world.manifests()]
    assert all({"a", "b"} <= names for names in counted[:9])
    assert 3 <= sum("c" in names for names in counted[:9]) < 9
    assert max(actor.stopped for actor in everyone[:2]) < SETTINGS.deadline + 20.0
    everyone[2].check_law()


def test_of_long_rounds_who_is_left_alone_goes_on():
    world = World(42)

    actors = [Mortal(world, name, 6, 600.0, within=2) for name in "ab"]
    joiner = Steady(world, "c", 4, 900.0)
    joiner.ready = 1500.0
    everyone = run([*actors, joiner])
    assert joiner.failure is None
    assert [outcome.counted for outcome in joiner.member.ledger.outcomes] == [True] * 4
    assert joiner.stopped < 1.5 * 900.0 + SETTINGS.deadline
    same_bits(everyone)


class Bad(Actor):
    """An island that hands in something else in round 2."""

    def __init__(self, *args, spoil):
        super().__init__(*args)
        self.spoil = spoil

    def spoiled(self, request):
        if getattr(request, "key", "") != _objects.contribution_key(2, self.member.who):
            return request
        if not isinstance(request, Create):
            return request
        return request._replace(data=self.spoil(self.member, request.data))


def with_header(**changes):
    def spoil(_, data):
        return Contribution.from_bytes(data)._replace(**changes).to_bytes()

    return spoil


def with_values(value):
    def spoil(member, data):
        tree = {path: np.full(leaf.shape, value, np.float32) for path, leaf in PARAMS.items()}
        states = member.programs.init()
        payloads, *_ = member.programs.compress(
            fg.NoMemory(), tree, (), states, member.anchor.round, 0
        )
        blobs = member.programs.to_bytes(payloads)
        return Contribution.from_bytes(data)._replace(blobs=blobs).to_bytes()

    return spoil


POISON = {
    "not finite": with_values(np.nan),
    "norm .*, the median has": with_values(1e4),
    "of another model": with_header(model="0"),
    "holds another anchor": with_header(anchor="0"),
    "stale: starts from round": with_header(base=-1),
    "not there yet": with_header(base=3),
    "of weight nan": with_header(weight=float("nan")),
    "of weight 1e-318": with_header(weight=1e-318),
    "says that it is of a": with_header(who=_objects.Who("a", 1)),
    "for round 1": with_header(round=1),
    "altered": lambda _, data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "altered, or cut off": lambda _, data: data[:-9],
    "cut off": lambda *_: b"",
    "no object that starts": lambda *_: b"x" * 300,
}


@pytest.mark.parametrize("reason", POISON)
def test_what_is_poisoned_counts_nowhere_and_is_named(reason):
    world = World(5)
    everyone = [Actor(world, name, 5, 10.0) for name in "ab"]
    everyone.append(Bad(world, "c", 5, 10.0, spoil=POISON[reason]))
    run(list(everyone))
    same_bits(everyone)
    manifest = world.manifests()[2]
    assert [entry.island for entry in manifest.counted] == ["a", "b"]
    ((island, _, said),) = manifest.refused
    assert island == "c"
    assert re.search(reason, said), said
    for actor in everyone[:2]:
        actor.check_law()
    fates = [o for o in everyone[2].member.ledger.outcomes if not (o.counted or o.kept)]
    assert [(fate.round, fate.reason) for fate in fates] == [(2, said)]
    assert all(np.isfinite(leaf).all() for leaf in everyone[0].member.anchor.params.values())


def test_a_weight_counts_for_no_more_than_the_limit():
    world = World(5)
    everyone = [Actor(world, name, 3, 10.0) for name in "ab"]
    everyone.append(Bad(world, "c", 3, 10.0, spoil=with_header(weight=1e9)))
    run(list(everyone))
    same_bits(everyone)
    assert [entry.weight for entry in world.manifests()[2].counted] == [1.0, 1.0, SETTINGS.limit]


@pytest.mark.parametrize("begins", range(1, 10, 3))
def test_one_may_join_at_every_round(begins):
    """It holds the same bits from then on, nothing of it is lost, and soon all wait for it."""
    world = World(20 + begins)
    actors = [Actor(world, name, 12, 10.0) for name in "ab"]
    joiner = Actor(world, "c", 4, 10.0)
    joiner.ready = 12.0 * begins
    digests = lawful(run([*actors, joiner]))
    assert joiner.digests[max(digests)] == digests[max(digests)]
    fates = joiner.member.ledger.outcomes
    assert all(fate.counted or fate.kept for fate in fates)
    assert fates[-1].counted


def test_who_comes_back_after_what_it_needs_is_gone_takes_the_newest_anchor():
    """It was cut off for longer than contributions are kept, with one of its own on the way."""
    world = World(30)

    class CutOff(Actor):
        def postpones(self, request):
            return 400.0 * (
                getattr(request, "key", "") == _objects.contribution_key(2, self.member.who)
            )

    others = [Actor(world, name, 30, 10.0) for name in "ab"]
    everyone = run([*others, CutOff(world, "c", 5, 10.0)])
    digests = same_bits(everyone)
    back = everyone[2]
    assert back.digests[max(digests)] == digests[max(digests)]
    skipped = set(range(max(digests))) - set(back.digests)
    assert len(skipped) > 2 * SETTINGS.anchors
    assert _objects.contribution_key(3, others[0].member.who) in world.removed
    assert next(o for o in back.member.ledger.outcomes if o.round == 2).kept
    back.check_law()


def test_two_that_start_at_once_under_one_name_are_one():
    world = World(32)
    twins = [Actor(world, "a", 3, 10.0) for _ in range(2)]
    other = Actor(world, "b", 3, 10.0)
    everyone = run([*twins, other])
    same_bits(everyone)
    first, second = sorted(twins, key=lambda twin: twin.member.who)
    assert "which start 2 took over from start 1" in str(first.failure)
    assert [outcome.counted for outcome in second.member.ledger.outcomes] == [True] * 3
    for manifest in world.manifests():
        assert len({entry.island for entry in manifest.counted}) == len(manifest.counted)
