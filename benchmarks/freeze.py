"""What must not change while the code does: bits, bytes, losses, and how long things take.

    python benchmarks/freeze.py --write            # keeps what the code does now
    python benchmarks/freeze.py                    # compares it with what was kept
    python benchmarks/freeze.py --times ../before  # seconds of this checkout and another, in turns

The file has a hash of each codec's payload, the bytes of each exchange, and the bits of a loss
after 30 steps of each method. A row that is only in one of the two is said, and is no failure.
`compile_time.py` and `programs.py` have the seconds to compile and the kernels for an H100.
"""

import argparse
import hashlib
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import _record
import jax
import numpy as np

sys.path.insert(0, str(_record.ROOT / "tests"))


import methods
from program import Column, Program, Reset, run, simulated
from tasks import TASKS

import fftgrad as fg

cases = importlib.import_module("cases")
FILE = _record.ROOT / "benchmarks/freeze.json"
STEPS, WORKERS, N = 30, 4, 1000
LIKE = {"w": jax.ShapeDtypeStruct((40, 24), "float32"), "b": jax.ShapeDtypeStruct((24,), "float32")}
TIMED: dict[str, Callable[[], Any]] = {
    "top-k 1 %, 8 bits": lambda: fg.AllGather(fg.chain(fg.TopK(0.01), fg.LogQuantizer(8))),
    "FFT 64, 1 %": lambda: fg.AllGather(fg.chain(fg.Fft(block=64), fg.TopK(0.01))),
    "FFT 4096, 5 %": lambda: fg.AllGather(fg.chain(fg.Fft(block=4096), fg.TopK(0.05))),
    "budget 30x": lambda: fg.AllGather(fg.Budget(ratio=30)),
    "budget 100x": lambda: fg.AllGather(fg.Budget(ratio=100)),
    "two stages 25x": lambda: fg.TwoStage(fg.Budget(ratio=25), 8),
    "PowerSGD 4": lambda: fg.PowerSgd(rank=4),
}


def payloads() -> Iterator[tuple[str, str]]:
    """Of each codec, by its name."""
    x, step = cases.values((N,), seed=5), fg.Step.of(3, 7)
    for name, codec in cases.CODECS.items():
        out = jax.jit(lambda x, codec=codec: codec.compress(x, codec.init(x), step).payload)(x)
        bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(out))
        yield name, hashlib.sha256(bits).hexdigest()[:8]


def sizes() -> Iterator[tuple[str, list[float]]]:
    """Of each exchange: what a worker hands over, and what crosses its link."""
    for name, exchange in cases.EXCHANGES.items():
        try:
            found = fg.wire_bytes(exchange, LIKE), fg.link_bytes(exchange, LIKE, 4)
        except ValueError:  # they change by step
            continue
        yield name, list(found)


def unsent(self: Program) -> tuple[float, float]:
    """No bytes, which would be another program to compile."""
    del self
    return 1.0, 1.0


def losses() -> Iterator[tuple[str, str]]:
    """Of each method after a few steps of a tiny model."""
    mesh, task = simulated(WORKERS), TASKS["lm"](True)
    Program.sent = unsent
    for method in {m.name: m for m in (*methods.METHODS, *methods.ENDS)}.values():
        program = Program(task, method, STEPS, mesh, devices=False)
        end = run(program, 1.0, 0, task.schedule, Reset(), Column(program))
        yield method.name, float(end["loss"]).hex()
        jax.clear_caches()


FROZEN: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "payloads": payloads,
    "bytes": sizes,
    "losses": losses,
}


def seconds(values: int) -> dict[str, float]:
    """Of one worker's update, in this process."""
    like = jax.ShapeDtypeStruct((values // 2048, 2048), "float32")
    found: dict[str, float] = {}
    for name, make in TIMED.items():
        tx = fg.compressed_pmean(make(), fg.ErrorFeedback(), axis_name="data")
        took = fg.planning.time_exchange(tx, like, {"data": 8}, seconds=0.5)
        found[name] = took.compress + took.decompress
    return found


def in_turns(other: pathlib.Path, values: int, rounds: int) -> list[dict[str, Any]]:
    """Medians of both checkouts, whose processes alternate."""
    found: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    for _ in range(rounds):
        for which, root in (("before", other), ("after", _record.ROOT)):
            command = [sys.executable, __file__, "--alone", "--values", str(values)]
            env = os.environ | {"PYTHONPATH": str(root)}
            out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
            for name, took in json.loads(out.stdout.splitlines()[-1]).items():
                found[which].setdefault(name, []).append(took)
    rows: list[dict[str, Any]] = []
    for name in TIMED:
        before, after = (statistics.median(found[which][name]) for which in found)
        rows.append({"row": name, "before": before, "after": after, "ratio": after / before})
        print(f"{name:20} {1e3 * before:8.2f} ms {1e3 * after:8.2f} ms {after / before:6.2f}")
    return rows


def main() -> None:
    """Keeps, compares, or times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep what the code does now")
    parser.add_argument("--parts", default=",".join(FROZEN), help="what to look at, by comma")
    parser.add_argument("--times", type=pathlib.Path, help="another checkout to time beside this")
    parser.add_argument("--values", type=int, default=1 << 22, help="of the gradient that is timed")
    parser.add_argument("--rounds", type=int, default=3, help="of both checkouts")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(seconds(args.values)))
        return
    if args.times:
        in_turns(args.times.resolve(), args.values, args.rounds)
        return
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    now = {part: dict(FROZEN[part]()) for part in args.parts.split(",")}
    if args.write:
        FILE.write_text(json.dumps(kept | _record.head() | now, separators=(",", ":")) + "\n")
        return
    changed = 0
    for part, rows in now.items():
        before = kept.get(part, {})
        for name in {**before, **rows}:
            if name not in before or name not in rows:
                print(f"{part}: {name}: {'new' if name in rows else 'gone'}")
            elif before[name] != rows[name]:
                changed += 1
                print(f"{part}: {name}: {before[name]} -> {rows[name]}")
    print(f"{changed} changed")
    raise SystemExit(changed > 0)


if __name__ == "__main__":
    main()
