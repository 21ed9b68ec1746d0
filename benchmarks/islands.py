"""Islands over slow links, with one that is away for a third of the run; and many islands.

Each island is a process in a network namespace of its own, whose link is limited in both
directions, and the store is a real server in another one. `preempted` trains a language model by
four islands: with all of them, and with one that is killed and comes back; beside it one program of
`jax.distributed` that averages gradients at each step, and has to start again whenever it loses or
gets a process. All stop after as many tokens. `links` exchanges only. `many` starts up to 64
islands of a tiny model as threads of one process, on a folder. Limits need root and iproute2;
`--loopback` runs without them.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax.numpy as jnp
import network as net
import numpy as np
import stores
from _record import ROOT, head, markdown, parser, save, table, thin
from _record import write as write_file
from island_worker import Job
from rich.console import Console
from slow_network import priority

import fftgrad as fg

HERE = pathlib.Path(__file__).parent
ISLANDS = 4
NAMES = ("a", "b", "c", "d")
AWAY = "d"
"""The island that is killed when a third of the tokens are read, and comes back after two."""
RUNS = ("islands", "islands, one away", "dense, one program", "dense, one program, one away")
WINDOW = 60
"""Steps of all islands over which a training loss is averaged."""
PARTS = ("preempted", "links", "many")
PATIENCE = 900.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    out = parser(
        __doc__,
        "islands",
        part=(list(PARTS), "of the measurements"),
        rate=("100mbit", "of each link and direction"),
        delay=("50ms", "of each packet"),
        loopback=(False, "no namespaces, no limits"),
        server=("seaweed", "where objects are: seaweed, ceph; or folder, over no link"),
        runs=(list(RUNS), "of `preempted`"),
        rounds=(30, "of four islands, which say how many steps are made in all"),
        every=(15, "inner steps of a round"),
        deadline=(10.0, "of a round, in seconds"),
        pace=(0.15, "seconds that a step takes at least"),
        values=([100_000, 1_000_000, 10_000_000], "parameters, in `links`"),
        islands=([4, 16, 64], "in `many`"),
        repeats=(1, "turns of `preempted`"),
        seed=(0, "of parameters and batches; grows with the turn"),
        show=(False, "run nothing, print the tables of what is there and draw the figure"),
    )
    args = out.parse_args(argv)
    if args.smoke:
        args.loopback, args.server, args.runs = True, "folder", list(RUNS[:2])
        args.rounds, args.every, args.deadline, args.pace = 6, 4, 3.0, 0.1
        args.values, args.islands = [1000], [3]
    return args


# Processes


class Supervisor:
    """Starts processes in their namespaces, and ends them."""

    def __init__(
        self, args: argparse.Namespace, network: net.Network, server: stores.Server
    ) -> None:
        self.args, self.network, self.server = args, network, server
        self.folder = pathlib.Path()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: Job) -> None:
        """The process of a job."""
        command = [*priority(), sys.executable, str(HERE / "island_worker.py"), job.dumps()]
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
            **os.environ,
            **self.server.environment,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "PJRT_NPROC": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        with (self.folder / f"{job.name}.log").open("ab") as log:
            self.processes[job.name] = subprocess.Popen(
                self.network.command(job.number, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, *names: str) -> None:
        """Ends processes without a warning."""
        for name in names or tuple(self.processes):
            process = self.processes.pop(name)
            process.kill()
            process.wait()

    def failed(self) -> bool:
        """Whether a process ended with an error."""
        return any(process.poll() for process in self.processes.values())

    def wait(self) -> None:
        """Until all have ended well."""
        for name, process in self.processes.items():
            if process.wait(PATIENCE):
                log = (self.folder / f"{name}.log").read_text()
                raise SystemExit(f"{name} ended with code {process.returncode}: {log[-2000:]}")
        self.processes.clear()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a process has written; not the line that it is writing."""
        path = self.folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def steps(self) -> int:
        """Those of all together. It is asked often, beside what is measured."""
        paths = [self.folder / f"{name}.jsonl" for name in NAMES]
        return sum(path.read_text().count('"step"') for path in paths if path.exists())


@contextlib.contextmanager
def cluster(args: argparse.Namespace) -> Generator[Supervisor]:
    """Namespaces, a server in the last one, and a folder."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network: net.Network = net.Loopback()
        if not args.loopback:
            namespaces = stack.enter_context(net.namespaces(ISLANDS + 1, args.delay))
            namespaces.limit(args.rate)
            network = namespaces
        server = stores.Server((folder / "objects").as_uri(), {})
        if args.server != "folder":
            (folder / "server").mkdir()
            make: Any = getattr(stores, args.server)
            address = network.address(ISLANDS)

            def enter(command: Sequence[str]) -> list[str]:
                return network.command(ISLANDS, [*priority(), *command])

            server = stack.enter_context(make(folder / "server", address, enter))
        supervisor = Supervisor(args, network, server)
        supervisor.folder = folder
        try:
            yield supervisor
        finally:
            supervisor.kill()


# One away


def job(at: Supervisor, role: str, number: int, **options: Any) -> Job:
    """What an island or a rank is told."""
    args = at.args
    common: dict[str, Any] = {"every": args.every, "deadline": args.deadline, "pace": args.pace}
    own: dict[str, Any] = {"folder": str(at.folder), "smoke": args.smoke, "islands": ISLANDS}
    return Job(role, NAMES[number], number, **(common | own | options))


def start(at: Supervisor, name: str, seed: int, ranks: int, only: str = "") -> None:
    """All processes of a run, or one island of it."""
    role = "train" if name.startswith("islands") else "program"
    place = f"{at.network.address(0)}:{net.free_port()}"
    if role == "train":
        place, ranks = f"{at.server.url}/{at.folder.name}", ISLANDS
    for number in range(ranks):
        if only in ("", NAMES[number]):
            at.start(job(at, role, number, store=place, seed=seed, islands=ranks))


def follow(at: Supervisor, name: str, seed: int, budget: int) -> list[tuple[float, str]]:
    """A run until so many steps are made; what happened to its processes, and when."""
    events: list[tuple[float, str]] = []
    due = [(budget / 3, "killed"), (2 * budget / 3, "started")] if "away" in name else []
    is_program = not name.startswith("islands")
    start(at, name, seed, ISLANDS)
    while not at.failed() and (read := at.steps()) < budget:
        time.sleep(0.2)
        if due and read >= due[0][0]:
            _, what = due.pop(0)
            events.append((time.time(), what))
            if is_program or what == "killed":
                at.kill(*([] if is_program else [AWAY]))
            if is_program or what == "started":
                ranks = ISLANDS - 1 if what == "killed" else ISLANDS
                start(at, name, seed, ranks, "" if is_program else AWAY)
    (at.folder / "end").touch()
    at.wait()
    return events


def preempted(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Loss after as many tokens, with and without a loss of a process."""
    runs: list[dict[str, Any]] = []
    budget = args.rounds * args.every * ISLANDS
    with cluster(args) as at:
        base = at.folder
        for turn in range(args.repeats):
            for name in args.runs:
                at.folder = base / f"{turn}-{RUNS.index(name)}"
                at.folder.mkdir()
                events = follow(at, name, args.seed + turn, budget)
                runs.append(record(at, name, turn, events))
                write(args, "preempted", runs)
    return runs


def record(at: Supervisor, name: str, turn: int, events: list[tuple[float, str]]) -> dict[str, Any]:
    """A run as JSON."""
    logs = {own: at.lines(own) for own in NAMES}
    steps = sorted(
        (line["time"], line["loss"], line["step"])
        for own in logs.values()
        for line in own
        if "step" in line
    )
    begin, window = steps[0][0], min(WINDOW, len(steps))
    read = np.cumsum([count for _, _, count in steps])
    smooth = np.convolve([loss for _, loss, _ in steps], np.ones(window) / window, "valid")
    curve = [
        [round(when - begin, 1), int(count), float(loss)]
        for (when, _, _), count, loss in zip(
            steps[window - 1 :], read[window - 1 :], smooth, strict=True
        )
    ]
    ends = [line for own in logs.values() for line in own if "end" in line]
    by_round: dict[int, str] = {}
    for line in ends:
        if by_round.setdefault(line["end"], line["digest"]) != line["digest"]:
            raise SystemExit(f"{name}: islands of one round hold different bits")
    out: dict[str, Any] = {
        "run": name,
        "turn": turn,
        "tokens": int(read[-1]),
        "seconds": steps[-1][0] - begin,
        "held_out": statistics.mean(line["loss"] for line in ends),
        "events": [(round(when - begin, 1), what) for when, what in events],
        "assessed": thin(curve),
    }
    if name.startswith("islands"):
        waits = [line["island_s"] for own in logs.values() for line in own if "step" in line]
        whole = [line for own in logs.values() for line in own[-1:] if len(starts(own)) == 1]
        rounds = max(by_round)
        out |= {"rounds": rounds, "longest_s": max(waits)}
        out["island_s"] = sum(waits) / ISLANDS / rounds
        for kind in ("creates", "reads", "lists", "written", "read"):
            out[kind] = statistics.mean(line[kind] for line in whole) / rounds
        out["counted"] = {own: lines[-1]["counted"] for own, lines in logs.items()}
    return out


def starts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The starts of an island."""
    return [line for line in lines if "joined" in line]


# The exchange alone


def links(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds, bytes and requests of a round in which nothing is learned."""
    runs: list[dict[str, Any]] = []
    with cluster(args) as at:
        base = at.folder
        for values in args.values:
            at.folder = base / str(values)
            at.folder.mkdir()
            url = f"{at.server.url}/{values}"
            for number in range(ISLANDS):
                own = {"store": url, "values": values, "rounds": 3 if args.smoke else 8}
                at.start(job(at, "exchange", number, **own, deadline=60.0))
            at.wait()
            logs = [at.lines(name) for name in NAMES]
            if len({(own[-1]["end"], own[-1]["digest"]) for own in logs}) > 1:
                raise SystemExit("islands of one round hold different bits")
            # The first round waits for islands that start later, and the last one for nobody.
            lines = [line for own in logs for line in own[1:-1]]
            out = {"values": values, "seconds": statistics.median(x["seconds"] for x in lines)}
            for kind in ("creates", "reads", "lists", "written", "read"):
                out[kind] = statistics.mean(line[kind] for line in lines)
            runs.append(out)
            write(args, "links", runs)
    return runs


# Many


def many(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Islands as threads of one process, on a folder: rounds a minute, requests, growth."""
    runs: list[dict[str, Any]] = []
    for count in args.islands:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(of_threads(pathlib.Path(folder), count, 3 if args.smoke else 20))
        write(args, "many", runs)
    return runs


def of_threads(folder: pathlib.Path, count: int, rounds: int) -> dict[str, Any]:
    """So many islands for so many rounds: they take turns, and none waits for its thread."""
    codec = fg.chain(fg.TopK(fraction=0.1), fg.LogLevels(bits=4))
    settings = fg.islands.Settings(
        fg.AllGather(codec), every=2, islands=count, deadline=60.0, anchors=4
    )
    rng, url = np.random.default_rng(0), folder.as_uri()
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(
                fg.islands.Island(url, f"i{i:02}", jnp.zeros(1000), settings=settings, delay=1)
            )
            for i in range(count)
        ]
        params: list[Any] = [island.params for island in made]
        begin, sizes = time.monotonic(), dict[int, int]()
        while (done := min(island.round for island in made)) < rounds:
            sizes.setdefault(done, stored(folder))
            for i, island in enumerate(made):
                moved = np.asarray(params[i]) + rng.standard_normal(1000).astype(np.float32)
                params[i] = island.step(jnp.asarray(moved))
            time.sleep(0.01)
        seconds = time.monotonic() - begin
        traffic = [island.traffic for island in made]
        digests = {(island.round, island.digest) for island in made}
    if len({number for number, _ in digests}) < len(digests):
        raise SystemExit("islands of one round hold different bits")
    sizes[done] = stored(folder)
    out: dict[str, Any] = {
        "islands": count,
        "rounds": done,
        "rounds_per_minute": 60 * done / seconds,
    }
    for kind in ("creates", "reads", "lists", "written", "read"):
        out[kind] = statistics.mean(each[kind] for each in traffic) / done
    middle = min(sizes, key=lambda number: abs(number - done / 2))
    out["stored"] = sizes[done]
    out["growth"] = (sizes[done] - sizes[middle]) / max(1, done - middle)
    return out


def stored(folder: pathlib.Path) -> int:
    """Bytes of all objects in a folder, of which some go while they are counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


# The whole


def write(args: argparse.Namespace, name: str, runs: list[dict[str, Any]]) -> None:
    """What there is so far, as JSON."""
    settings = {k: v for k, v in vars(args).items() if k not in {"out", "show", "part"}}
    write_file(args.out / f"{name}.json", head() | {"settings": settings, "runs": runs}, "runs")


def cells(name: str, runs: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a part's table."""
    requests = ("creates", "reads", "lists")
    if name == "preempted":
        columns = ["", "held-out loss", "to the unbroken run", "seconds", "rounds"]
        columns += ["s a round", "kB a round", "GB a day"]
        return columns, [_of_run(run, runs) for run in runs]
    if name == "links":
        columns = ["parameters", "s a round", "kB written", "kB read", "requests"]
        return columns, [
            [
                f"{run['values']:,}",
                f"{run['seconds']:.2f}",
                f"{run['written'] / 1e3:,.1f}",
                f"{run['read'] / 1e3:,.1f}",
                f"{sum(run[kind] for kind in requests):.1f}",
            ]
            for run in runs
        ]
    columns = [
        "islands",
        "rounds a minute",
        "made",
        "read",
        "listings",
        "kB stored",
        "kB more a round",
    ]
    return columns, [
        [
            str(run["islands"]),
            f"{run['rounds_per_minute']:.1f}",
            *(f"{run[kind]:.1f}" for kind in requests),
            f"{run['stored'] / 1e3:,.0f}",
            f"{run['growth'] / 1e3:,.1f}",
        ]
        for run in runs
    ]


def _of_run(run: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """The row of a run of `preempted`."""
    whole = next(x for x in runs if x["turn"] == run["turn"] and run["run"].startswith(x["run"]))
    row = [run["run"], f"{run['held_out']:.3f}"]
    row += [f"{run['held_out'] / whole['held_out'] - 1:+.1%}", f"{run['seconds']:.0f}"]
    if "rounds" not in run:
        return [*row, "", "", "", ""]
    size = run["written"] + run["read"]
    day = size * run["rounds"] / run["seconds"] * 86_400
    row += [f"{run['rounds']}", f"{run['island_s']:.2f}", f"{size / 1e3:.0f}", f"{day / 1e9:.1f}"]
    return row


def page_table(name: str, runs: list[dict[str, Any]]) -> str:
    """A part's table for the page."""
    return markdown(*cells(name, runs))


def draw(runs: list[dict[str, Any]]) -> Any:
    """Training loss over time, of the first turn."""
    import _style as style  # the workers of a run draw nothing

    figure = style.figure(3.4)
    axes = figure.subplots()
    looks, lines = style.styles(RUNS), dict[str, Any]()
    for run in runs:
        if run["turn"]:
            continue
        seconds, _, losses = zip(*run["assessed"], strict=True)
        (lines[run["run"]],) = axes.plot(seconds, losses, **looks[run["run"]])
    axes.set(xscale="log", xlabel="seconds", ylabel="training loss, nats per byte")
    figure.legend(lines.values(), lines, ncols=2, loc="outside upper center")
    return figure


def show(folder: pathlib.Path) -> None:
    """The tables of what there is, and the figure."""
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            runs = json.loads(path.read_text())["runs"]
            Console().print(table(name, *cells(name, runs)))
            if name == "preempted":
                save(draw(runs), folder, "islands_away")


def main(argv: list[str] | None = None) -> None:
    """Measures, and shows all that there is."""
    args = parse_args(argv)
    if not args.show:
        measures = {"preempted": preempted, "links": links, "many": many}
        for name in args.part:
            if name not in measures:
                raise SystemExit(f"--part: must be of {', '.join(measures)}, got {name}")
            measures[name](args)
    show(args.out)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
