"""What a store says of its run."""

import pathlib

import pytest
from simulation import SETTINGS, Actor, Mortal, World, run

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.planning import _commands

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def world():
    """Three islands, of which one dies after three rounds."""
    world = World(11)

    actors = [
        Actor(world, "a", 8, 10.0),
        Actor(world, "b", 8, 10.0),
        Mortal(world, "c", 8, 10.0, within=3),
    ]
    run(actors)
    return world


@pytest.fixture
def folder(tmp_path, world):
    store = fg.islands.open_store(str(tmp_path))
    for key, data in world.objects.items():
        store.create(key, data)
    return str(tmp_path)


def test_the_command_shows_a_table(folder, capsys):
    assert main(["islands", "status", folder]) == 0
    out = capsys.readouterr().out
    assert "c did not come" in out
    assert "open: round 8, came: nobody yet; newest anchor: round 6" in out


def test_what_a_member_wrote_is_shown_as_text():
    """Nothing that moves the cursor."""
    one = fg.islands.RoundStatus(3, ["a"], [], {"b": "[/nothing] \x1b[2J"}, None, 1.0)
    shown = _commands.show_islands(fg.islands.Status(4, ["c\n"], 0, [one]))
    assert "b: [/nothing] ?[2J" in shown
    assert "c?;" in shown


def test_it_says_who_came_and_who_did_not(folder):
    found = fg.islands.status(folder)
    assert (found.open, found.anchor, found.came) == (8, 6, [])
    assert [sorted(one.counted) for one in found.rounds] == [["a", "b", "c"]] * 3 + [["a", "b"]] * 5
    assert [one.missed for one in found.rounds if one.missed] == [["c"]]
    assert all(one.loss == pytest.approx(0.5) for one in found.rounds)
    waited = [one.waited for one in found.rounds]
    assert waited[3] >= SETTINGS.deadline > max(waited[4:])
    assert len(fg.islands.status(folder, rounds=3).rounds) == 3


def test_a_damaged_manifest_is_told_beside_the_others(folder):
    (pathlib.Path(folder) / "rounds/000000005/manifest.json").write_text("{")
    found = fg.islands.status(folder)
    assert len(found.rounds) == 8
    told = "rounds/000000005/manifest.json is damaged (no JSON)"
    assert found.rounds[5].refused["?"] == told


def test_where_there_is_no_run_it_says_so(tmp_path):
    with pytest.raises(ValueError, match="must have a run"):
        fg.islands.status(str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        fg.islands.status(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
