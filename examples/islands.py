"""Three islands train the language model of train_lm.py, and one of them is killed.

Each is a process of its own, and they have nothing in common but a folder. One is killed without
a warning after a few rounds, and comes back later under its name; the others go on. At the end
all hold the same parameters. Pass --store s3://bucket/folder for another place than a folder.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from train_lm import ByteLM, corpus, sample

import fftgrad as fg

NAMES = "alpha", "beta", "gamma"
KILLED = "gamma"
CODEC = fg.chain(fg.TopK(fraction=0.03), fg.LogQuantizer(bits=4))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--store", help="URL of the store; a folder of its own if left out")
    add("--rounds", type=int, default=30, help="rounds until the end")
    add("--every", type=int, default=15, help="H, inner steps to a round")
    add("--delay", type=int, default=3, help="inner steps that go on meanwhile")
    add("--deadline", type=float, default=6.0, help="seconds for which a round waits for one")
    add("--kill", type=int, default=8, help=f"round in which {KILLED} is killed")
    add("--back", type=int, default=18, help="round in which it is started again")
    add("--pace", type=float, default=0.15, help="seconds that a step takes at least")
    add("--batch", type=int, default=4, help="sequences of an island and step")
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--width", type=int, default=96, help="width of the transformer")
    add("--layers", type=int, default=2, help="layers of the transformer")
    add("--lr", type=float, default=2e-3, help="learning rate of Adam, the inner optimizer")
    add("--outer-lr", type=float, default=1.0, help="learning rate of the outer optimizer")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs"), help="folder for the results")
    add("--smoke", action="store_true", help="a few rounds of a tiny model, to see that it runs")
    add("--island", help=argparse.SUPPRESS)  # the name, in the process of one
    args = parser.parse_args(argv)
    args.out = args.out.expanduser()
    if args.smoke:
        args.rounds, args.kill, args.back, args.deadline, args.pace = 14, 1, 2, 2.0, 0.08
        args.every, args.delay, args.batch, args.context = 10, 2, 2, 32
        args.width, args.layers = 32, 1
    return args


# An island


def train(args: argparse.Namespace, log: Any) -> None:
    """One island, from the newest anchor of the store to the last round."""
    model = ByteLM(args.width, args.layers)
    first = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, args.context), jnp.int32))
    settings = fg.islands.Settings(
        fg.AllGather(CODEC, clip_to_median=True),
        sync_every=args.every,
        rate=args.outer_lr,
        islands=len(NAMES),
        deadline=args.deadline,
        anchors=5,
    )
    tx = optax.adam(args.lr, b2=0.99)

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    text, held_out = corpus()
    rng = np.random.default_rng([os.getpid(), NAMES.index(args.island)])
    state = tx.init(first)
    island = fg.islands.Island(
        args.store, args.island, first, settings=settings, overlap_steps=args.delay, mixing=0.5
    )
    with island:
        params = island.params
        while island.round < args.rounds:
            begin = time.monotonic()
            batch = sample(rng, text, args.batch, args.context)
            params, state, loss = step(params, state, batch)
            params = island.step(params, weight=batch.size, loss=loss)
            record = {"time": time.time(), "round": island.round, "loss": float(loss)}
            log.write(json.dumps(record) + "\n")
            time.sleep(max(0.0, begin + args.pace - time.monotonic()))
        common = island.finish()
        batch = sample(np.random.default_rng(1), held_out, 64, args.context)
        record = {"held out": float(jax.jit(loss_of)(common, batch)), "digest": island.digest}
        record |= {"round": island.round, "traffic": island.traffic}
        record |= {"outcomes": [outcome._asdict() for outcome in island.outcomes]}
        log.write(json.dumps(record) + "\n")


# All of them


def start(args: argparse.Namespace, name: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
    """The process of an island."""
    own = [sys.executable, __file__, *sys.argv[1:], "--store", args.store, "--island", name]
    told = {"JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    if args.smoke:
        told["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return subprocess.Popen([*own, "--out", str(folder)], env=os.environ | told)


def run(args: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    """All islands to their ends; what was done to them, and when."""
    events: list[dict[str, Any]] = []
    processes = {name: start(args, name, folder) for name in NAMES}
    try:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            try:
                seen = fg.islands.status(args.store, rounds=1)
            except ValueError:  # there is none yet
                continue
            if seen.open >= args.kill and not events:
                processes[KILLED].kill()
                events.append({"time": time.time(), "round": seen.open, "what": "killed"})
            if seen.open >= args.back and len(events) == 1:
                processes[KILLED].wait()
                processes[KILLED] = start(args, KILLED, folder)
                events.append({"time": time.time(), "round": seen.open, "what": "started again"})
    finally:
        for process in processes.values():
            process.kill()
    for name, process in processes.items():
        if process.wait():
            raise SystemExit(f"{name} ended with exit code {process.returncode}")
    return events


def records(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """What an island wrote, of its last line a killed one only a part."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def plot(
    found: dict[str, list[dict[str, Any]]],
    seen: fg.islands.Status,
    events: list[dict[str, Any]],
    path: pathlib.Path,
) -> None:
    """Loss of each island over time, and who counted in which round."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1))
    begin = min(own[0]["time"] for own in found.values())
    for name, own in found.items():
        steps = [record for record in own if "loss" in record]
        times = np.array([record["time"] - begin for record in steps])
        losses = np.array([record["loss"] for record in steps])
        window = min(15, len(losses))
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        times = times[window - 1 :]
        gap = np.flatnonzero(np.diff(times) > 3 * max(np.median(np.diff(times)), 0.3))
        smooth[gap] = np.nan  # a line across the time in which it was not there would be none
        above.plot(times, smooth, label=name, linewidth=1.2)
    for event in events:
        above.axvline(event["time"] - begin, color="0.5", linewidth=0.8, linestyle="--")
        above.annotate(
            f"{KILLED} {event['what']}",
            (event["time"] - begin, 0.97),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            fontsize=8,
        )
    above.set(xlabel="seconds", ylabel="training loss, nats per byte")
    above.legend(loc="upper right")
    rounds = [one.round for one in seen.rounds]
    for row, name in enumerate(found):
        there = [one.round for one in seen.rounds if name in one.counted]
        missed = [one.round for one in seen.rounds if name in one.missed]
        below.scatter(there, [row] * len(there), marker="s", s=14)
        below.scatter(missed, [row] * len(missed), marker="x", s=18, color="0.3")
    below.set(yticks=range(len(found)), yticklabels=found, xlabel="round: counted, or missed (x)")
    below.set(xlim=(rounds[0] - 0.7, rounds[-1] + 0.7), ylim=(len(found) - 0.5, -0.5))
    figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None) -> None:
    """Starts all islands, or is one of them."""
    args = parse_args(argv)
    if args.island:
        with (args.out / f"{args.island}.jsonl").open("a", buffering=1) as log:
            train(args, log)
        return
    folder = args.out / datetime.datetime.now().strftime("islands-%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    args.store = args.store or (folder / "store").absolute().as_uri()
    print(f"{len(NAMES)} islands, {args.rounds} rounds of {args.every} steps; store: {args.store}")
    events = run(args, folder)
    for event in events:
        print(f"round {event['round']}: {KILLED} {event['what']}")
    found = {name: records(folder, name) for name in NAMES}
    seen = fg.islands.status(args.store, rounds=args.rounds + 10)
    for name, own in found.items():
        last = own[-1]
        counted = sum(name in one.counted for one in seen.rounds)
        missed = sum(name in one.missed for one in seen.rounds)
        share = 1 - counted / len(seen.rounds)
        used = last["traffic"]
        size = used.pop("written") + used.pop("read")
        print(
            f"{name:6} counted in {counted} rounds, missed {missed}, away for "
            f"{share:.0%}; {sum(used.values())} requests, {size / 1e6:.2f} MB; held-out loss "
            f"{last['held out']:.4f} after round {last['round']}, digest {last['digest']}"
        )
    ends = {(own[-1]["round"], own[-1]["digest"]) for own in found.values()}
    if len({number for number, _ in ends}) < len(ends):
        raise SystemExit("islands of one round hold different bits")
    plot(found, seen, events, folder / "islands.png")
    print(f"written: {folder}/islands.png")


if __name__ == "__main__":
    main()
