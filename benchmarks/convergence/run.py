"""What each method does to training: the same model, data, seed and steps, at the bytes it sends.

Two tasks: a byte-level language model under Adam, and a residual convolutional network on
scikit-learn's digits under SGD with momentum 0.9. The learning rate of each method is the best of
one grid, on the first seed; the other seeds run at that rate. Results are written after each run,
and runs whose results are there already are not repeated.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from figures import frontier, markdown, score
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from methods import (
    AXIS,
    Method,
    Transformation,
    local_optimizer,
    methods,
    optimizer,
    pmean,
    schedule,
)
from rich.console import Console
from tasks import ROOT, TASKS, WORKERS, Params, Task

import fftgrad as fg

RESULTS = ROOT / "benchmarks/results/convergence"
COMMITTED = "steps-200"
"""The run of the figure in the documentation."""
SMOKE = {"dense", "PowerSGD rank 1"}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", default="lm,digits", help="which tasks")
    add("--methods", default="", help="parts of names, by semicolon; all if empty")
    add("--steps", type=int, default=200, help="optimizer steps of each run")
    add("--seeds", type=int, default=2, help="how many seeds")
    add("--rates", default="0.5,1,2", help="learning rates tried, in units of the task's own")
    add("--out", type=pathlib.Path, default=RESULTS, help="folder for the results")
    add("--name", default="", help="of the file written; steps-200 after 200 steps, if empty")
    add("--show", action="store_true", help="run nothing, show what is there")
    add("--smoke", action="store_true", help="a few steps of tiny models")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.seeds, args.rates = 2, 1, "1"
    args.name = args.name or f"steps-{args.steps}"
    return args


# Runs


@dataclasses.dataclass
class Program:
    """A task under a method, compiled once for all rates and seeds."""

    task: Task
    method: Method
    steps: int
    mesh: Mesh

    def __post_init__(self) -> None:
        task, mesh, local = self.task, self.mesh, self.method.around is not None
        self.spread = NamedSharding(mesh, P(AXIS))
        self.replicated = NamedSharding(mesh, P())

        def together(params: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
            loss, gradient = fg.value_and_grad(task.loss, AXIS)(params, batch)
            updates, state = tx.update(gradient, state, params)
            updates = optax.tree.scale(-rate, updates)
            return optax.apply_updates(params, updates), state, loss[None]

        def alone(rows: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
            params = jax.tree.map(lambda row: row[0], rows)
            loss, gradient = jax.value_and_grad(task.loss)(params, batch)
            tx = local_optimizer(task, self.method, rate)
            updates, state = tx.update(gradient, state, params)
            rows = jax.tree.map(lambda p: p[None], optax.apply_updates(params, updates))
            return rows, state, loss[None]

        if local:
            tx, step = local_optimizer(task, self.method, 0.0), alone
        else:
            tx, step = optimizer(task, self.method, self.steps), together
        params, batch = self.params(0), jax.device_put(next(task.batches(0)), self.spread)
        rows = P(AXIS) if local else P()
        specs = fg.state_specs(jax.eval_shape(tx.init, params), AXIS)
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
        self.init = jax.jit(init).lower(params).compile()
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(rows, specs, P(AXIS), P()),
            out_specs=(rows, specs, P(AXIS)),
        )
        rate = jax.device_put(jnp.float32(0), self.replicated)
        lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(
            self.of_workers(params), self.init(params), batch, rate
        )
        self.step = lowered.compile()

    def params(self, seed: int) -> Params:
        """The first parameters, on all devices."""
        return jax.device_put(self.task.params(seed), self.replicated)

    def of_workers(self, params: Params) -> Params:
        """What the workers train: with local steps a row of each."""
        if self.method.around is None:
            return params
        rows = jax.tree.map(lambda p: jnp.stack([p] * WORKERS), params)
        return jax.device_put(rows, self.spread)

    def assessed(self, params: Params, state: Any) -> dict[str, float]:
        """What the parameters are worth that all workers have in common."""
        return self.task.assess(params if self.method.around is None else state.anchor)


def run(program: Program, rate: float, seed: int) -> Any:
    """One training run, as a record."""
    task, method, steps = program.task, program.method, program.steps
    common = program.params(seed)
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(common))
    state, params = program.init(common), program.of_workers(common)
    batches = task.batches(seed)
    rates = schedule(task, method, rate, steps)
    start = time.perf_counter()
    losses: list[jax.Array] = []
    for count in range(steps):
        batch = jax.device_put(next(batches), program.spread)
        now = jax.device_put(jnp.float32(rates(count)), program.replicated)
        params, state, loss = program.step(params, state, batch, now)
        losses.append(loss)
    curve = [float(np.mean(loss)) for loss in losses]  # which also waits for the last step
    elapsed = time.perf_counter() - start

    by_branch: collections.Counter[tuple[int, ...]] = collections.Counter()
    for collective in fg.audit(program.step):
        by_branch[collective.branch] += collective.bytes
    if method.around is None:
        first, later = (by_branch[branch] for branch in method.branches)
    else:
        first = later = sum(by_branch.values()) / method.every
    warm_up = round(method.warm_up * steps)
    learns = round(method.learns * steps)
    meanwhile, once = (by_branch[branch] if learns else 0 for branch in method.learning)
    rest = steps - warm_up - learns
    mean = (first * warm_up + meanwhile * learns + once + later * rest) / steps
    return {
        "task": task.name,
        "method": method.name,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        **program.assessed(params, state),
        "bytes": later,
        "ratio": dense / later,
        "mean_ratio": dense / mean,
        "warm_up": [warm_up, first],
        "ms_per_step": 1e3 * elapsed / steps,
        "training_loss": round(statistics.mean(curve[-15:]), 4),
    }


def errors(task: Task, listed: list[Method], mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The relative error of the mean of one gradient, without memory, of each method.

    The gradient is that of a dense run after 50 steps; none for methods whose updates are no mean.
    """
    program = Program(task, Method("dense", pmean(fg.AllReduce())), 50, mesh)
    batches, params = task.batches(0), program.params(0)
    state = program.init(params)
    for _ in range(50):
        batch = jax.device_put(next(batches), program.spread)
        rate = jax.device_put(jnp.float32(task.rate / 2), program.replicated)
        params, state, _ = program.step(params, state, batch, rate)

    def gradient(params: Params, batch: Any) -> Params:
        _, own = fg.value_and_grad(task.loss, AXIS)(params, batch)
        return jax.tree.map(lambda g: g[None], own)

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS))
    rows = jax.jit(mapped)(params, jax.device_put(next(batches), program.spread))
    exact = jax.tree.map(lambda g: g.mean(0), rows)
    for method in listed:
        if method.signs or method.adam or method.make is None:
            continue
        tx = method.make(50)

        def mean(rows: Params, tx: Transformation = tx) -> Params:
            own = jax.tree.map(lambda g: g[0], rows)
            return tx.update(own, tx.init(own))[0]

        mapped = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        difference = jax.tree.map(jnp.subtract, jax.jit(mapped)(rows), exact)
        yield method.name, float(optax.tree.norm(difference) / optax.tree.norm(exact))


def main() -> None:
    """Runs what is missing, and shows all that there is."""
    from _record import compact, head

    args = parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = Mesh(np.array(jax.devices("cpu")[:WORKERS]), (AXIS,), axis_types=(AxisType.Auto,))
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.json"
    results: Any = {**head(), "errors": {}, "runs": []}
    if path.exists() and not args.smoke:
        results = json.loads(path.read_text())
    wanted = [word for word in args.methods.split(";") if word]
    rates = [float(rate) for rate in args.rates.split(",")]

    def chosen(name: str) -> bool:
        if wanted:
            return any(word in name for word in wanted)
        return not args.smoke or name in SMOKE

    @functools.cache
    def program(task: Task, method: Method) -> Program:
        return Program(task, method, args.steps, mesh)

    def get(task: Task, method: Method, rate: float, seed: int) -> Any:
        key = {
            "task": task.name,
            "method": method.name,
            "rate": rate,
            "seed": seed,
            "steps": args.steps,
        }
        for record in results["runs"]:
            if key.items() <= record.items():
                return record
        record = run(program(task, method), rate, seed)
        results["runs"].append(record)
        path.write_text(compact(results))
        shown = ("task", "method", "rate", "seed", "loss", "ratio", "ms_per_step")
        console.print({name: record[name] for name in shown})
        return record

    for task in (TASKS[name](args.smoke) for name in args.tasks.split(",")):
        listed = [m for m in methods() if chosen(m.name)]
        listed = [m for m in listed if task.adam or not m.muon]
        for method in [] if args.show else listed:
            best = min((get(task, method, rate, 0) for rate in rates), key=score)
            for seed in range(1, args.seeds):
                get(task, method, best["rate"], seed)
            program.cache_clear()
        if not args.show:
            known = results["errors"].setdefault(task.name, {})
            for name, error in errors(task, [m for m in listed if m.name not in known], mesh):
                known[name] = error
                path.write_text(compact(results))
    print(markdown(results))
    picture = "frontier.png" if args.name == COMMITTED else f"frontier-{args.name}.png"
    frontier(results["runs"]).savefig(args.out / picture, dpi=100)
    console.print(f"written: {path}, {args.out / picture}")


if __name__ == "__main__":
    main()
