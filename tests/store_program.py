"""An island that trains on a store of which every request is watched, until it is told to end.

store_program.py STORE NAME FOLDER OPTIONS
store_program.py nursery

A nursery starts one for each line of its input, by a fork: what takes long, to import JAX, is done
once. Options are JSON: `deadline` and `islands` of the settings; `pace`, seconds of a step;
`rounds`, at which it ends unless the file `end` of the folder says so; `waits`, for a file of the
folder, until it joins; `dies`, at which request and how many seconds after its begin, and `nth` of
these; `lag`, seconds until an object is listed;
`spoils`, the round for which it hands in other bytes than it made, and how. The folder gets what it
hands in, before anybody sees it.
"""

import hashlib
import json
import os
import pathlib
import random
import re
import select
import signal
import sys
import time
import traceback
from typing import NoReturn

import numpy as np
from processes import TOLD, tell

import fftgrad as fg
from fftgrad.islands._residual import Ledger

CODEC = fg.chain(fg.TopK(fraction=0.3), fg.LogQuantizer(bits=5))
PARAMS = {"b": np.zeros(3, np.float32), "w": np.zeros((4, 4), np.float32)}


CONTRIBUTION = re.compile(r"rounds/(\d{9})/([\w-]+\.\d{6})")


def kind_of(key: str) -> str:
    """What an object is."""
    if CONTRIBUTION.fullmatch(key):
        return "contribution"
    return "manifest" if "/manifest" in key else key.partition("/")[0]


class Watched:
    """A store as the program sees it."""

    def __init__(self, store, folder, options):
        self.store, self.folder = store, folder
        self.dies, self.left = options.get("dies"), options.get("nth", 1)
        self.lag, self.seen = options.get("lag", 0.0), {}
        self.spoils = options.get("spoils")

    def begins(self, request):
        """Where it has to die the kernel does that, whatever the program does by then."""
        if self.dies and request == self.dies[0]:
            self.left -= 1
            if not self.left:
                tell("dies", request)
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, self.dies[1]))

    def create(self, key, data):
        if found := CONTRIBUTION.fullmatch(key):
            number, who = int(found[1]), found[2]
            if self.spoils and number == self.spoils[0]:
                data = SPOILED[self.spoils[1]](data)
            save(self.folder / "handed" / f"{who}.{number}", hashlib.sha256(data).hexdigest())
        self.begins(f"create {kind_of(key)}")
        return self.store.create(key, data)

    def read(self, key):
        self.begins(f"read {kind_of(key)}")
        return self.store.read(key)

    def list(self, folder, after=""):
        self.begins("list")
        found = self.store.list(folder, after)
        now = time.monotonic()
        for key in found:
            self.seen.setdefault(key, now + random.uniform(0, self.lag))
        return [key for key in found if self.seen[key] <= now]

    def delete(self, keys):
        self.begins("delete")
        self.store.delete(keys)


SPOILED = {
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "cut": lambda data: data[: len(data) // 2],
}


def save(path: pathlib.Path, text: str) -> None:
    """A file that is there whole, or not at all."""
    path.parent.mkdir(exist_ok=True)
    part = path.parent.parent / f"{random.getrandbits(64):x}.part"
    part.write_text(text)
    part.replace(path)


def flat(tree) -> list[float]:
    """All leaves as one vector."""
    return np.concatenate([np.asarray(tree[path]).ravel() for path in sorted(tree)]).tolist()


def note_changes(island, folder: pathlib.Path) -> None:
    """Has what is handed in written down, before it is."""
    compress = Ledger.compress

    def noted(self, programs, change, number, own):
        blobs, pending = compress(self, programs, change, number, own)
        told = {"learned": flat(change.tree), "sent": flat(pending.sent)}
        save(folder / "changes" / f"{island._member.who}.{number}", json.dumps(told))
        return blobs, pending

    Ledger.compress = noted


def main(url: str, name: str, folder: pathlib.Path, options) -> None:
    settings = fg.islands.Settings(
        fg.AllGather(CODEC),
        sync_every=2,
        islands=options.get("islands", 3),
        deadline=options.get("deadline", 2.0),
        anchors=3,
    )
    store = Watched(fg.islands.open_store(url), folder, options)
    end, rng = folder / "end", np.random.default_rng()
    longest = 0.0
    tell("here")
    while not (folder / options.get("waits", ".")).exists():
        time.sleep(0.01)
    with fg.islands.Island(store, name, PARAMS, settings=settings) as island:
        note_changes(island, folder)
        params = {path: np.asarray(leaf) for path, leaf in island.params.items()}
        tell("in", island.round, island.digest)
        while island.round < options.get("rounds", 1e9):
            if end.exists() and island.round >= int(end.read_text()):
                break
            for path, leaf in params.items():
                noise = rng.standard_normal(leaf.shape)
                params[path] = (leaf - 0.1 * (leaf - 1.0 + noise)).astype(np.float32)
            time.sleep(options.get("pace", 0.02))
            before, begun = island.round, time.monotonic()
            params = {k: np.asarray(v) for k, v in island.step(params).items()}
            longest = max(longest, time.monotonic() - begun)
            if island.round > before:
                tell("round", island.round, island.digest)
            if island.trouble:
                tell("trouble", island.trouble)
        island.finish()
        who, counted = island._member.who, sum(one.counted for one in island.outcomes)
        save(folder / "residuals" / str(who), json.dumps(flat(island._member.ledger.residual)))
        tell("end", island.round, island.digest, counted, f"{longest:.2f}")


def nursery() -> None:
    """Forks an island for each line, and writes down how it ended, until there is no more input."""
    children: dict[int, pathlib.Path] = {}
    told = os.fdopen(0, "rb", buffering=0)  # or lines would wait where nobody looks
    while True:
        ready = select.select([told], [], [], 0.02)[0]
        if ready and not (line := told.readline()):
            break
        if ready:
            own, arguments = json.loads(line)
            child = os.fork()
            if not child:
                be(pathlib.Path(own), arguments)
            save(pathlib.Path(f"{own}.pid"), str(child))
            children[child] = pathlib.Path(f"{own}.code")
        for child, path in tuple(children.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                save(path, str(os.waitstatus_to_exitcode(status)))
                del children[child]
    for child in children:
        os.kill(child, signal.SIGKILL)


def be(own: pathlib.Path, arguments: list[str]) -> NoReturn:
    """Is one of the nursery's islands, to its end."""
    code = 1
    try:
        os.environ[TOLD] = f"{own}.told"
        with pathlib.Path(f"{own}.err").open("wb") as err:
            os.dup2(err.fileno(), 2)
        start(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start(url: str, name: str, folder: str, options: str) -> None:
    """An island, by what a command line says."""
    main(url, name, pathlib.Path(folder), json.loads(options))


if __name__ == "__main__":
    nursery() if sys.argv[1] == "nursery" else start(*sys.argv[1:])
