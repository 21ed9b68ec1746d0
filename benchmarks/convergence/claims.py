"""Claims of the FFT paper and of ScaleCom that take training, on the tasks of `tasks.py`.

The FFT paper: the more frequencies are dropped the worse the accuracy, from some theta on; a theta
that goes to zero where the learning rate falls trains as dense does, even after 0.99. As in the
paper the rate is constant and falls to a tenth once, after 130 of 180 epochs there and at the same
share of the steps here, and all thetas run at one rate.

ScaleCom: the residuals of the workers are alike, so that what one of them finds large is large in
the mean of all. After a run, with the next gradients added to the residuals as in a step: the mean
cosine between two workers, the share of a worker's k largest that are among the k largest of the
mean, and what is lost of the mean if one worker chooses, beside its own best choice.

Runs whose results are there already are not repeated.
"""

import argparse
import itertools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from methods import AXIS, Method, fixed, pmean
from rich.console import Console
from run import Program
from tasks import ROOT, TASKS, WORKERS, Params, Task

import fftgrad as fg

CUT = 130 / 180
"""The share of the steps after which the rate falls to a tenth."""
THETAS = (0.5, 0.7, 0.85, 0.9, 0.99)
FALLING = (0.9, 0.99)
CHUNK = 50
"""Values for each one that ScaleCom sends."""
UPTAKES = (1.0, 0.1)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", default="digits,lm", help="which tasks")
    add("--methods", default="", help="parts of names, by semicolon; all if empty")
    add("--steps", type=int, default=200, help="optimizer steps of each run")
    add("--seeds", type=int, default=2, help="how many seeds")
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/papers")
    add("--smoke", action="store_true", help="a few steps of tiny models, few rows")
    args = parser.parse_args()
    if args.smoke:
        args.tasks, args.steps, args.seeds = "digits", 3, 1
    return args


def rows(steps: int, smoke: bool) -> dict[str, Method]:
    """What is trained with, by its label."""
    cut = round(CUT * steps)
    found = {"dense": Method("dense", pmean(fg.AllReduce()))}
    for theta in THETAS[:1] if smoke else THETAS:
        tx = fg.compressed_pmean(fg.methods.fft_sparsification(theta), axis_name=AXIS)
        found[f"theta {theta}"] = Method(f"theta {theta}", fixed(tx))
    for theta in FALLING[:1] if smoke else FALLING:
        name = f"theta {theta}, then 0"
        falling = fg.compressed_pmean(
            fg.methods.fft_sparsification(theta, theta_schedule={cut: 0.0}), axis_name=AXIS
        )
        found[name] = Method(name, fixed(falling))
    for uptake in UPTAKES[:1] if smoke else UPTAKES:
        tx = fg.compressed_pmean(fg.methods.scalecom(CHUNK, uptake), axis_name=AXIS)
        found[f"ScaleCom, uptake {uptake}"] = Method(f"ScaleCom {uptake}", fixed(tx), False)
    return found


def train(program: Program, steps: int, seed: int) -> tuple[Params, Any, Any]:
    """Parameters and state at the end, and the batch that would be next."""
    params, batches = program.params(seed), program.task.batches(seed)
    state = program.init(params)
    for count in range(steps):
        rate = program.task.rate / (10 if count >= round(CUT * steps) else 1)
        batch = jax.device_put(next(batches), program.spread)
        now = jax.device_put(jnp.float32(rate), program.replicated)
        params, state, loss = program.step(params, state, batch, now)
        jax.block_until_ready(loss)
    return params, state, jax.device_put(next(batches), program.spread)


def gathered(tree: Any) -> np.ndarray:
    """A row for each worker."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(WORKERS, -1) for leaf in leaves], axis=1)


def similarity(program: Program, params: Params, state: Any, batch: Any) -> dict[str, float]:
    """Of what the workers would choose from in the next step."""

    def gradient(params: Params, batch: Any) -> Params:
        _, own = fg.value_and_grad(program.task.loss, AXIS)(params, batch)
        return jax.tree.map(lambda g: g[None], own)

    mapped = jax.shard_map(gradient, mesh=program.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS))
    residuals = gathered(state[0].memory.value.residual)
    compensated = residuals + gathered(jax.jit(mapped)(params, batch))
    return {"residuals": cosine(residuals), "cosine": cosine(compensated), **chosen_by(compensated)}


def cosine(vectors: np.ndarray) -> float:
    """The mean of those of all pairs."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return float(np.mean([a @ b for a, b in itertools.combinations(unit, 2)]))


def chosen_by(vectors: np.ndarray) -> dict[str, float]:
    """Overlap of a worker's choice with that of the mean, and the energy of the mean each loses."""
    mean = vectors.mean(0)
    k = -(-mean.size // CHUNK)
    best = largest(mean, k)
    chosen = [largest(row, k) for row in vectors]

    def lost(support: np.ndarray) -> float:
        return float(1 - np.sum(mean[support] ** 2) / np.sum(mean**2))

    return {
        "overlap": float(np.mean([np.isin(own, best).mean() for own in chosen])),
        "lost": float(np.mean([lost(own) for own in chosen])),
        "least": lost(best),
    }


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """The positions of the k largest magnitudes."""
    return np.argpartition(np.abs(x), -k)[-k:]


def markdown(results: Any) -> str:
    """Both tables of the page, means over the seeds."""
    tasks = results["tasks"]

    def mean(task: str, name: str, key: str, digits: int, scale: float = 1.0) -> str:
        seeds = tasks.get(task, {}).get(name, {}).get(key)
        return f"{scale * float(np.mean(seeds)):.{digits}f}" if seeds else ""

    losses = ["| trained with | digits, loss | accuracy, % | lm, loss |", "|---|---|---|---|"]
    alike = [
        "| task, uptake | cosine of residuals | with the gradient | overlap | lost | at least |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for task in tasks.values() for name in task):
        accuracy = mean("digits", name, "accuracy", 1, 100)
        digits, lm = (mean(task, name, "loss", 3) for task in ("digits", "lm"))
        losses.append(line(name, digits, accuracy, lm))
        if name.startswith("ScaleCom"):
            keys = ("residuals", "cosine", "overlap", "lost", "least")
            for task in tasks:
                if name in tasks[task]:
                    label = f"{task}, {name.rsplit(maxsplit=1)[1]}"
                    alike.append(line(label, *(mean(task, name, key, 2) for key in keys)))
    return "\n".join(losses) + "\n\n" + "\n".join(alike)


def line(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def main() -> None:
    """Runs what is missing, and shows all that there is."""
    from _record import compact, head

    args = parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = Mesh(np.array(jax.devices("cpu")[:WORKERS]), (AXIS,), axis_types=(AxisType.Auto,))
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "training.json"
    results: Any = {**head(), "steps": args.steps, "tasks": {}}
    if path.exists() and not args.smoke:
        results = json.loads(path.read_text())
    wanted = [word for word in args.methods.split(";") if word]
    for task in (TASKS[name](args.smoke) for name in args.tasks.split(",")):
        known = results["tasks"].setdefault(task.name, {})
        for name, method in rows(args.steps, args.smoke).items():
            if wanted and not any(word in name for word in wanted):
                continue
            if len(known.get(name, {"loss": []})["loss"]) < args.seeds:
                known[name] = measured(task, name, method, args, mesh)
                path.write_text(compact(results))
                console.print(task.name, name, known[name])
    print(markdown(results))
    console.print(f"written: {path}")


def measured(
    task: Task, name: str, method: Method, args: argparse.Namespace, mesh: Mesh
) -> dict[str, list[float]]:
    """What came out of each seed."""
    program = Program(task, method, args.steps, mesh)
    found: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        params, state, batch = train(program, args.steps, seed)
        record = task.assess(params)
        if name.startswith("ScaleCom"):
            record |= similarity(program, params, state, batch)
        for key, value in record.items():
            found.setdefault(key, []).append(float(f"{value:.4g}"))
    return found


if __name__ == "__main__":
    main()
