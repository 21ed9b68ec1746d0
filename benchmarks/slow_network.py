"""Train over slow links, in real processes: what a step takes.

Each worker is a process in a network namespace of its own, and its link is limited in both
directions. Methods run one after the other, from the same parameters on the same batches.
The clock does not count compiling. Limits need root and iproute2; `--loopback` runs without them.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import network as net
from _record import ROOT, head, markdown, parser
from _record import write as write_file
from job import Job, save_params
from methods import LINKS, PEERS
from tasks import TASKS

HERE = pathlib.Path(__file__).parent
# Large arrays come and go in every step. The allocator would return each to the kernel, which
# clears a page for every 4 KiB the next time: that took longer than the arithmetic. And what is cut
# off for alignment must not wait in a list of small blocks: between two arrays, it keeps their
# places from being used again, and the heap grows.
MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1"
    ":glibc.malloc.trim_threshold=68719476736:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
}
PARAMS = "params.npz"
PATIENCE = 900.0
"""Seconds without a step after which a run counts as stuck."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    out = parser(
        __doc__,
        "slow_network",
        workers=(4, "processes; with two, gloo's links jam each other"),
        rate=("1gbit", "of each link and direction, such as 100mbit"),
        delay=("", "of each packet, such as 0.5ms"),
        loopback=(False, "no namespaces, no limits"),
        method=("dense,muon-100x", "names of LINKS in methods.py, in this order; or all"),
        steps=(10, "optimizer steps of a run"),
        warm=(2, "of them, first ones that step times leave out"),
        seed=(0, "of parameters and batches: another one for each turn"),
        name=("run", "of the file written"),
    )
    args = out.parse_args(argv)
    if args.smoke:
        args.workers, args.steps, args.loopback = 2, 5, True
    return args


# Runs


@dataclasses.dataclass
class Run:
    """One training run, and what came of it."""

    method: str
    label: str
    every: int = 1  # steps to an exchange
    status: str = "waiting"
    # what each worker has written so far
    lines: list[list[dict[str, Any]]] = dataclasses.field(
        default_factory=list[list[dict[str, Any]]]
    )

    def having(self, key: str, worker: int = 0) -> list[dict[str, Any]]:
        """A worker's lines with this key: "step", or "facts", which is written once."""
        return [line for line in self.lines[worker] if key in line] if self.lines else []

    def median(self, key: str, warm: int) -> float:
        """Of worker 0's steps once warm; of their means, where not every step has an exchange."""
        values = [step[key] for step in self.having("step") if key in step]
        values = values[warm:] or values
        cycles = range(0, max(1, len(values) - self.every + 1), self.every)
        means = [statistics.mean(values[i : i + self.every]) for i in cycles if values]
        return statistics.median(means) if means else float("nan")

    def sent(self, args: argparse.Namespace) -> tuple[float, float]:
        """Bytes and packets that a worker sends in a step."""
        each = list[list[int]]()
        for worker in range(len(self.lines)):
            steps = self.having("step", worker)[args.warm :]
            whole = len(steps) // self.every * self.every  # a part would count too few exchanges
            each += [step["sent"] for step in steps[: whole or None]]
        if not each:
            return 0, 0
        count, packets = (statistics.mean(x) for x in zip(*each, strict=True))
        sharing = args.workers if args.loopback else 1  # workers to an interface
        return count / sharing, packets / sharing

    def record(self, args: argparse.Namespace) -> dict[str, Any]:
        """The run as JSON."""
        count, packets = self.sent(args)
        steps = [self.having("step", worker) for worker in range(len(self.lines))]
        losses = [statistics.mean(x["loss"] for x in same) for same in zip(*steps, strict=False)]
        keys = sorted({key for step in steps[0] for key in step if key.endswith("_s")})
        return {
            "method": self.method,
            "label": self.label,
            "every": self.every,
            "status": self.status,
            "step_s": self.median("seconds", args.warm),
            **{key: self.median(key, args.warm) for key in keys},
            "sent_bytes": count,
            "sent_packets": packets,
            "facts": self.having("facts")[0]["facts"] if self.having("facts") else {},
            "seconds": [round(step["seconds"], 4) for step in steps[0]],
            "losses": [round(loss, 4) for loss in losses],
        }


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """Starts the workers of a run, watches them, and ends them."""

    args: argparse.Namespace
    network: net.Loopback | net.Namespaces
    folder: pathlib.Path

    def start(self, run: Run) -> "list[subprocess.Popen[bytes]]":
        """One process for each worker."""
        args, (port,) = self.args, net.free_ports(1)
        script = HERE / ("peer.py" if run.method in PEERS else "worker.py")
        processes = list["subprocess.Popen[bytes]"]()
        for worker in range(args.workers):
            job = Job(
                worker=worker,
                workers=args.workers,
                coordinator=f"{self.network.address(0)}:{port}",
                interface=self.network.interface,
                method=run.method,
                steps=args.steps,
                seed=args.seed,
                params=str(self.folder / PARAMS),
                folder=str(self.folder),
                smoke=args.smoke,
            )
            (self.folder / f"worker{worker}.jsonl").unlink(missing_ok=True)
            command = [*priority(), sys.executable, str(script), job.dumps()]
            with (self.folder / f"worker{worker}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        self.network.command(worker, command),
                        env=self.environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C is for the supervisor
                    )
                )
        return processes

    def environment(self) -> dict[str, str]:
        """The environment of a worker."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            **os.environ,
            **MEMORY,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "PJRT_NPROC": "1",
            "OMP_NUM_THREADS": "1",
            # Threads that spin, at real-time priority, would keep their own work from running.
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.network.interface,
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def watch(self, run: Run) -> None:
        """The run, from beginning to end."""
        moved = (0, time.monotonic())
        processes = self.start(run)
        codes: dict[int, int] = {}
        try:
            while len(codes) < len(processes):
                time.sleep(0.1)
                now = time.monotonic()
                run.lines = [self.read(worker) for worker in range(len(processes))]
                for worker, process in enumerate(processes):
                    if worker not in codes and process.poll() is not None:
                        codes[worker] = process.returncode
                count = sum(map(len, run.lines))
                if count != moved[0]:
                    moved = count, now
                if any(codes.values()) or now - moved[1] > PATIENCE:
                    break
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            run.lines = [self.read(worker) for worker in range(len(processes))]
            done = len(codes) == len(processes) and not any(codes.values())
            run.status = "done" if done else "failed" if codes else "stopped"

    def read(self, worker: int) -> list[dict[str, Any]]:
        """What a worker has written; not the line that it is writing."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / f"worker{worker}.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def complaint(self) -> str:
        """The last lines of the logs."""
        logs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))]
        return "\n".join("\n".join(log.splitlines()[-12:]) for log in logs if "Error" in log)


@functools.cache
def priority() -> tuple[str, ...]:
    """What gives a process real-time priority, where that is allowed.

    gloo's thread spins while the holder of a lock is not scheduled: with few cores, that costs a
    small collective a tick of the kernel's clock, which is more than the collective.
    """
    command = ("chrt", "-r", "1")
    if not shutil.which("chrt"):
        return ()
    allowed = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if allowed.returncode == 0 else ()


# The whole


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs, in order."""
    if args.delay and args.loopback:
        raise SystemExit("--delay: packets over loopback cannot be delayed; leave --loopback out")
    labels = {name: method.name for name, method in LINKS.items()} | PEERS
    names = list(labels) if args.method == "all" else args.method.split(",")
    unknown = [name for name in names if name not in labels]
    if unknown:
        raise SystemExit(f"--method: there is no {unknown[0]}; choose from {','.join(labels)}")
    if any(name in PEERS for name in names) and not importlib.util.find_spec("torch"):
        raise SystemExit('--method: PyTorch\'s need torch; pip install -e ".[bench]"')
    every = {name: LINKS[name].every for name in names if name in LINKS}
    return [Run(name, labels[name], every.get(name, 1)) for name in names]


COLUMNS = ("", "steps", "loss", "s a step", "gradient", "MB sent", "")


def shown(run: Run, args: argparse.Namespace) -> list[str]:
    """A row of what came of a run."""
    steps = run.having("step")
    loss = f"{steps[-1]['loss']:.3f}" if steps else ""
    times = [f"{run.median(key, args.warm):.2f}" for key in ("seconds", "compute_s")]
    sent = f"{run.sent(args)[0] / 1e6:.3f}"
    return [run.label, str(len(steps)), loss, *times, sent, run.status]


def main(argv: list[str] | None = None) -> None:
    """Everything, and what there is of it if it is interrupted."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: clean up, and write
    runs = plan(args)
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = net.Loopback()
        if not args.loopback:
            namespaces = stack.enter_context(net.namespaces(args.workers, args.delay))
            namespaces.limit(args.rate)
            network = namespaces
        params = TASKS["large"](args.smoke).params(args.seed)
        save_params(params, str(folder / PARAMS))
        supervisor = Supervisor(args, network, folder)
        print(markdown(COLUMNS, ()), flush=True)
        for run in runs:
            try:
                supervisor.watch(run)
            finally:
                print(f"| {' | '.join(shown(run, args))} |", flush=True)
                write(runs, args)
            if run.status != "done":
                print(supervisor.complaint(), flush=True)
    print(f"written: {args.out / args.name}.json")
    if any(run.status != "done" for run in runs):
        raise SystemExit(1)


def write(runs: list[Run], args: argparse.Namespace) -> None:
    """What there is so far, as JSON."""
    settings = {k: v for k, v in vars(args).items() if k not in {"out", "name"}}
    records = [run.record(args) for run in runs if run.lines]
    content = head() | {"settings": settings, "realtime": bool(priority()), "runs": records}
    write_file(args.out / f"{args.name}.json", content, "runs")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
