"""What must not change while the code does: losses to the bit, and how long updates take.

    python benchmarks/freeze.py --losses ../before  # of 30 steps of each method, in both checkouts
    python benchmarks/freeze.py --times ../before   # seconds of an update in both, in turns

The goldens of the tests have payloads and bytes. `compile_time.py` and `programs.py` have the
seconds to compile and the kernels for an H100.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import methods
from _record import ROOT
from program import Program, run
from tasks import TASKS

import fftgrad as fg

STEPS, WORKERS = 30, 4
TIMED: dict[str, Callable[[], Any]] = {
    "top-k 1 %, 8 bits": lambda: fg.AllGather(fg.chain(fg.TopK(0.01), fg.LogQuantizer(8))),
    "FFT 64, 1 %": lambda: fg.AllGather(fg.chain(fg.Fft(block=64), fg.TopK(0.01))),
    "FFT 4096, 5 %": lambda: fg.AllGather(fg.chain(fg.Fft(block=4096), fg.TopK(0.05))),
    "budget 30x": lambda: fg.AllGather(fg.Budget(ratio=30)),
    "budget 100x": lambda: fg.AllGather(fg.Budget(ratio=100)),
    "two stages 25x": lambda: fg.TwoStage(fg.Budget(ratio=25), 8),
    "PowerSGD 4": lambda: fg.PowerSgd(rank=4),
}


def losses(only: str) -> dict[str, str]:
    """The bits of each method's loss after a few steps of a tiny model, in this process."""
    task, found = TASKS["lm"](True), dict[str, str]()
    for method in (method for name, method in methods.BY_NAME.items() if only in name):
        end = run(Program(task, method, WORKERS), STEPS, 1.0, 0)
        found[method.name] = float(end["loss"]).hex()
        jax.clear_caches()
    return found


def seconds(only: str) -> dict[str, float]:
    """Of one worker's update of 4 million values, in this process."""
    like = jax.ShapeDtypeStruct((2048, 2048), "float32")
    found: dict[str, float] = {}
    for name, make in TIMED.items():
        if only in name:
            tx = fg.compressed_pmean(make(), fg.ErrorFeedback(), axis_name="data")
            took = fg.planning.time_exchange(tx, like, {"data": 8}, seconds=0.5)
            found[name] = took.compress + took.decompress
    return found


def alone(root: pathlib.Path, part: str, only: str) -> dict[str, Any]:
    """The rows of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--alone", part, "--only", only]
    env = os.environ | {"PYTHONPATH": str(root)}
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    """Compares or times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=pathlib.Path, help="another checkout to compare with this")
    parser.add_argument("--times", type=pathlib.Path, help="another checkout to time beside this")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="of both checkouts, to time")
    parser.add_argument("--alone", choices=("losses", "times"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps({"losses": losses, "times": seconds}[args.alone](args.only)))
    elif args.times:
        roots = args.times.resolve(), ROOT
        both = [[alone(at, "times", args.only) for at in roots] for _ in range(args.rounds)]
        for name in both[0][1]:
            before, after = (1e3 * statistics.median(r[i][name] for r in both) for i in (0, 1))
            print(f"{name:20} {before:8.2f} ms {after:8.2f} ms {after / before:6.2f}")
    elif args.losses:
        before, now = (alone(at, "losses", args.only) for at in (args.losses.resolve(), ROOT))
        changed = [name for name in now if before.get(name) != now[name]]
        for name in changed:
            print(f"{name}: {before.get(name)} -> {now[name]}")
        print(f"{len(changed)} changed of {len(now)}")
        raise SystemExit(bool(changed))
    else:
        parser.error("--losses or --times: must name a checkout, got none.")


if __name__ == "__main__":
    main()
