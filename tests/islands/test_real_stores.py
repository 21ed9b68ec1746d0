"""Islands that are killed, cut off, slow or lied to, in processes, on a real server."""

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest
import store_program
from processes import ROOT, environment_of

import fftgrad as fg

pytest.importorskip("obstore")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("real stores")]
PROGRAM = str(ROOT / "tests" / "store_program.py")
DEADLINE = 2.0
SLACK = 3.0
"""Seconds for what is no waiting: a request that is under way, and other programs of a machine."""
KILLS = {"folder": 50, "seaweed": 16}
TAKES = {"folder": 0.002, "seaweed": 0.02}
"""Seconds of a request, and some: a kill is at a random instant of it."""
REQUESTS = {
    "create contribution": 3,
    "create manifest": 3,
    "read contribution": 3,
    "read manifest": 4,
    "create anchors": 1,
    "create islands": 1,
    "list": 12,
    "delete": 1,
}
"""In which an island dies, and in which of them at most: a writer, a reader, one that lists ..."""


class Nursery:
    """A process that forks islands."""

    def __init__(self, process):
        self.process = process

    def start(self, own, arguments):
        """An island, whose files are there from now on."""
        for kind in ("told", "err"):
            own.with_name(f"{own.name}.{kind}").touch()
        self.process.stdin.write(json.dumps([str(own), arguments]) + "\n")
        self.process.stdin.flush()
        return Forked(own)


class Forked:
    """An island of a nursery."""

    def __init__(self, own):
        self.own = own

    def file(self, kind):
        return self.own.with_name(f"{self.own.name}.{kind}")

    @property
    def told(self):
        return self.file("told").read_text().splitlines()

    @property
    def err(self):
        return self.file("err")

    def is_over(self):
        return self.file("code").exists()

    def kill(self):
        until(self.file("pid").exists)
        os.kill(int(self.file("pid").read_text()), signal.SIGKILL)

    def wait(self, seconds=240.0):
        """Its exit code."""
        until(self.is_over, seconds)
        return int(self.file("code").read_text())


class Run:
    """Islands of one store, in a folder of their own."""

    def __init__(self, place, folder, nursery):
        self.kind, url = place
        self.url = f"{url}/{folder.name}"
        self.folder, self.nursery = folder, nursery
        self.processes = []

    def start(self, name, **options):
        """An island in a process."""
        self.processes.append(self.nursery.start(*self.told_to(name, options)))
        return self.processes[-1]

    def told_to(self, name, options):
        """Where an island's files are, and its command line."""
        own = self.folder / f"{len(self.processes)}"
        told = json.dumps({"deadline": DEADLINE} | options)
        return own, [self.url, name, str(self.folder), told]

    def end(self, number):
        """Says to all that the run is over after so many rounds."""
        (self.folder / "end.part").write_text(str(number))
        (self.folder / "end.part").replace(self.folder / "end")

    def open_round(self):
        """The newest that anybody came to."""
        return max((number for number, _ in self.digests()), default=-1)

    def digests(self):
        """Rounds and what islands held before them, of all that ever were."""
        return [
            (int(words[1]), words[2])
            for process in self.processes
            for line in process.told
            if (words := line.split())[0] in ("in", "round", "end")
        ]

    def ends(self, processes=None):
        """Round, digest, contributions that counted, and seconds of the longest step of each."""
        found = []
        for process in self.processes if processes is None else processes:
            assert process.wait() == 0, process.err.read_text()
            (words,) = [line.split() for line in process.told if line.startswith("end")]
            found.append(End(int(words[1]), words[2], int(words[3]), float(words[4])))
        return found

    def check(self, living=None):
        """What holds after whatever was done to them; the manifests."""
        ends, digests = self.ends(living), {}
        for number, digest in self.digests():
            assert digests.setdefault(number, digest) == digest, number
        assert max(end.longest for end in ends) < 1.25 * DEADLINE + SLACK
        manifests = self.manifests()
        assert len(manifests) >= max(digests)
        self.check_law(manifests)
        return manifests

    def manifests(self):
        """What was decided in each round."""
        store, found = fg.islands.open_store(self.url), []
        while (data := store.read(f"rounds/{len(found):09}/manifest.json")) is not None:
            found.append(json.loads(data))
        return found

    def check_law(self, manifests):
        """Of each start that lives: what was counted + its residual = what it handed in."""
        files = {kind: self.files(kind) for kind in ("changes", "handed")}
        starts = sorted({who for who, _ in files["changes"]})
        checked = 0
        for who in starts:
            own = {n: json.loads(text) for (one, n), text in files["changes"].items() if one == who}
            for refused in manifests:
                if who in map(start_of, refused["refused"]):
                    own.pop(refused["round"], None)
            entries = [
                (m["round"], e) for m in manifests for e in m["counted"] if start_of(e) == who
            ]
            for number, entry in entries:
                assert entry["sha256"] == files["handed"][who, number]
            counted = total(own[number]["sent"] for number, _ in entries)
            if (residual := self.residual(who)) is not None:
                learned = total(change["learned"] for change in own.values())
                np.testing.assert_allclose(counted + residual, learned, atol=1e-4)
                checked += 1
        assert checked

    def files(self, kind):
        """What starts of islands have written, by start and round."""
        return {
            (who, int(number)): path.read_text()
            for path in (self.folder / kind).glob("*")
            for who, _, number in [path.name.rpartition(".")]
        }

    def residual(self, who):
        """What the memory of a start keeps; None if it died."""
        path = self.folder / "residuals" / who
        return np.array(json.loads(path.read_text())) if path.exists() else None


def start_of(entry):
    """Which start of an island a manifest names."""
    return f"{entry['island']}.{entry['incarnation']:06}"


def total(vectors):
    return sum(map(np.array, vectors), np.zeros(SIZE))


SIZE = sum(leaf.size for leaf in store_program.PARAMS.values())


class End(NamedTuple):
    """How an island ended."""

    round: int
    digest: str
    counted: int
    longest: float


@pytest.fixture(scope="module")
def nursery(place, tmp_path_factory):  # noqa: ARG001 (the server's environment is there by then)
    command = [sys.executable, PROGRAM, "nursery"]
    cache = tmp_path_factory.mktemp("programs")
    environment = os.environ | environment_of(cache)
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment) as process:
        yield Nursery(process)


@pytest.fixture
def run(place, nursery, tmp_path):
    made = Run(place, tmp_path, nursery)
    yield made
    for process in made.processes:
        if not process.is_over():
            process.kill()


def until(what, seconds=240.0):
    """Waits for something."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_who_is_killed_within_a_request_leaves_the_old_round_or_the_new_one(run):
    """Two live on, while others are killed by the kernel's timer, and some names come back."""
    rng, kills, number = random.Random(run.kind), KILLS[run.kind], 0
    living = [run.start(name, pace=0.1) for name in ("a", "b")]
    deaths = collections.Counter()
    requests = list(REQUESTS)
    while sum(deaths.values()) < kills:
        mortals = []
        for _ in range(2):
            request = requests[number % len(requests)]
            dies = [request, rng.uniform(0, TAKES[run.kind])]
            nth = rng.randint(1, REQUESTS[request])
            mortals.append(run.start(f"m{number % 7}", dies=dies, nth=nth))
            number += 1
        for mortal in mortals:
            assert mortal.wait() == -signal.SIGALRM, mortal.err.read_text()
            (said,) = [line for line in mortal.told if line.startswith("dies")]
            deaths[said.removeprefix("dies ")] += 1
        for process in living:
            assert not process.is_over(), process.err.read_text()
    run.end(run.open_round() + 4)
    run.check(living)
    assert deaths.keys() == REQUESTS.keys()
    assert all(end.counted > kills / 4 for end in run.ends(living))


def test_a_slow_one_late_listings_and_contributions_that_were_altered(run):
    common = {"lag": 0.5, "rounds": 16, "waits": "go"}
    run.start("a", **common, spoils=[10, "cut"])
    run.start("b", **common, spoils=[8, "flipped"])
    run.start("c", **common, pace=0.4)
    until(lambda: all(process.told for process in run.processes))
    (run.folder / "go").touch()
    manifests = run.check()
    reasons = {(m["round"], e["island"]): e["reason"] for m in manifests for e in m["refused"]}
    assert reasons
    assert reasons.keys() <= {(8, "b"), (10, "a")}  # one that is late in a round is in none
    assert set(reasons.values()) == {"altered, or cut off"}
    assert all(end.counted for end in run.ends())


def test_all_are_killed_and_one_comes_back(run):
    first = [run.start(name) for name in ("a", "b", "c")]
    until(lambda: run.open_round() >= 4)
    for process in first:
        process.kill()
    for process in first:
        assert process.wait() == -signal.SIGKILL
    reached = run.open_round()
    back = run.start("b", rounds=reached + 4)
    assert back.wait() == 0, back.err.read_text()
    manifests = run.check([back])
    assert {entry["island"] for entry in manifests[-1]["counted"]} == {"b"}
    words = next(line.split() for line in back.told if line.startswith("in"))
    assert int(words[1]) >= reached - 1


@contextlib.contextmanager
def small_disk(folder, size):
    """A disk of so many bytes, in memory."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "islands", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_store_stops_rounds_and_nothing_else(run):
    """They train on alone and say why; with room again they go on, and hold the same bits."""
    if run.kind != "folder":
        pytest.skip("the disk of this server is not the test's")
    disk = run.folder / "disk"
    with small_disk(disk, "256k"):
        run.url = f"file://{disk}/run"
        living = [run.start(name) for name in ("a", "b", "c")]
        until(lambda: all(any(x.startswith("round") for x in p.told) for p in living))
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        until(lambda: all(any(x.startswith("trouble") for x in p.told) for p in living))
        stopped = run.open_round()
        ballast.unlink()
        until(lambda: run.open_round() >= stopped + 4)
        run.end(run.open_round() + 2)
        run.check()
