"""What a store says of its run, to programs and to people."""

import io
import json
import pathlib

import pytest
from rich.console import Console
from simulation import SETTINGS, Actor, Mortal, World, run

import fftgrad as fg
from fftgrad.__main__ import main
from fftgrad.planning.commands import _islands

pytest.importorskip("obstore")


class Reader:
    """The store of a simulated world."""

    def __init__(self, world):
        self.world = world

    def read(self, key):
        return self.world.objects.get(key)

    def list(self, folder, after=""):
        return [key for key in self.world.objects if key.startswith(folder) and key > after]


@pytest.fixture(scope="module")
def world():
    """Three islands, of which one dies after three rounds."""
    world = World(11)

    actors = [
        Actor(world, "a", 8, 10.0),
        Actor(world, "b", 8, 10.0),
        Mortal(world, "c", 8, 10.0, within=3),
    ]
    run(actors, lambda _: None)
    return world


def test_it_says_who_came_and_who_did_not(world):
    found = fg.islands.status(Reader(world))
    assert (found.open, found.anchor, found.came) == (8, 6, [])
    assert [sorted(one.counted) for one in found.rounds] == [["a", "b", "c"]] * 3 + [["a", "b"]] * 5
    assert [one.missed for one in found.rounds if one.missed] == [["c"]]
    assert all(one.loss == pytest.approx(0.5) for one in found.rounds)
    assert found.rounds[3].waited >= SETTINGS.deadline
    assert len(fg.islands.status(Reader(world), rounds=3).rounds) == 3


@pytest.fixture
def folder(tmp_path, world):
    store = fg.islands.open_store(str(tmp_path))
    for key, data in world.objects.items():
        store.create(key, data)
    return str(tmp_path)


def test_the_command_shows_a_table(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["islands", "status", folder]) == 0
    out = capsys.readouterr().out
    assert "c did not come" in out
    assert "open: round 8, came: nobody yet; newest anchor: round 6" in out


def test_the_command_writes_json(folder, capsys):
    assert main(["islands", "status", folder, "--json", "-", "--rounds", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["round"] for one in found["rounds"]] == [6, 7]


def test_where_there_is_no_run_it_says_so(tmp_path, capsys):
    assert main(["islands", "status", str(tmp_path)]) == 2
    assert "must have a run" in capsys.readouterr().err
    assert main(["islands", "status", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_what_a_member_wrote_is_shown_as_text():
    """Neither markup nor what moves the cursor."""
    one = fg.islands.RoundStatus(3, ["a"], [], {"b": "[/nothing] \x1b[2J"}, None, 1.0)
    found = fg.islands.Status(4, ["c\n"], 0, [one])
    console = Console(width=120, file=io.StringIO())
    console.print(_islands.show(found))
    assert "b: [/nothing] ?[2J" in console.file.getvalue()
    assert "c?;" in console.file.getvalue()


def test_a_damaged_manifest_is_told_beside_the_others(folder):
    (pathlib.Path(folder) / "rounds/000000005/manifest.json").write_text("{")
    found = fg.islands.status(folder)
    assert len(found.rounds) == 8
    told = "rounds/000000005/manifest.json is damaged (no JSON)"
    assert found.rounds[5].refused["?"] == told
