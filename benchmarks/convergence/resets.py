"""What it costs to lose the residuals, and to keep them in bfloat16.

A checkpoint that leaves out what each worker has of its own starts again without residuals. Here
that happens never, once in the middle, every 50 and every 10 steps, to the language model of
`tasks.py` with 8 workers; all else goes on. With local steps a worker has more of its own: the
moments of its inner optimizer, and parameters that have left the common ones.

Runs whose results are there already are not repeated.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table
from tasks import ROOT, TASKS, WORKERS, Params, Task

import fftgrad as fg

AXIS = "data"
FIGURE = "resets.png"
FLOAT32, BFLOAT16 = fg.ErrorFeedback(), fg.ErrorFeedback(dtype="bfloat16")
DECAYED = fg.ErrorFeedback(decay=0.95)
TRIED = ("top-k 1 % + EF", "diloco, 8 local steps", "top-k 1 % + EF, bfloat16")
"""With `--smoke`."""
Transformation = Any
"""Of optax, with extra arguments."""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/resets")
    add("--steps", type=int, default=400, help="optimizer steps of each run")
    add("--seeds", type=int, default=2, help="how many seeds")
    add("--show", action="store_true", help="run nothing, show what is there")
    add("--smoke", action="store_true", help="a few steps of tiny models")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.seeds = 4, 1
    return args


def after_adam(exchange: Transformation) -> Callable[[jax.Array], Transformation]:
    """The exchange, and Adam without the momentum that feedback is."""

    def make(rate: jax.Array) -> Transformation:
        tail = optax.chain(optax.scale_by_adam(b1=0.0, b2=0.99), optax.scale(-rate))
        return optax.chain(exchange, tail)

    return make


def local(rate: jax.Array) -> Transformation:
    """Eight local steps of Adam, then 3 % of what they changed in 4 bits."""
    inner = optax.chain(optax.scale_by_adam(b2=0.99), optax.scale(-rate))
    return fg.optimizers.diloco(inner, optax.sgd(1.0), every=8, axis_name=AXIS)


@dataclasses.dataclass(frozen=True)
class Method:
    """What is trained with.

    Attributes:
      make: the optimizer, from its learning rate.
      rates: those tried, in units of the task's own; one where it is known to be the best of three.
      local: whether each worker has parameters of its own.
      only: of what is lost, the fields with this name; all that a worker has of its own if empty.
      resets: whether it runs with any.
    """

    name: str
    make: Callable[[jax.Array], Transformation]
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    local: bool = False
    only: str = ""
    resets: bool = True


def methods() -> list[Method]:
    """All the rows."""
    m = fg.methods

    def top_k(share: float, memory: fg.Memory = FLOAT32) -> Any:
        return after_adam(fg.compressed_pmean(m.top_k(share, memory=memory), axis_name=AXIS))

    return [
        Method("top-k 1 % + EF", top_k(0.01), (0.5,)),
        Method("top-k 0.1 % + EF", top_k(0.001)),
        Method(
            "signSGD + EF", after_adam(fg.compressed_pmean(m.sign_sgd(), axis_name=AXIS)), (1.0,)
        ),
        Method("diloco, 8 local steps", local, local=True),
        Method("diloco, residual only", local, local=True, only="residual"),
        Method("top-k 1 % + EF, bfloat16", top_k(0.01, BFLOAT16), resets=False),
        Method("top-k 0.1 % + EF, bfloat16", top_k(0.001, BFLOAT16), resets=False),
        Method("top-k 1 % + EF, decay 0.95", top_k(0.01, DECAYED), resets=False),
        Method("top-k 0.1 % + EF, decay 0.95", top_k(0.001, DECAYED), resets=False),
    ]


VARIANT_OF = {
    "diloco, residual only": "diloco, 8 local steps",
    "top-k 1 % + EF, bfloat16": "top-k 1 % + EF",
    "top-k 0.1 % + EF, bfloat16": "top-k 0.1 % + EF",
    "top-k 1 % + EF, decay 0.95": "top-k 1 % + EF",
    "top-k 0.1 % + EF, decay 0.95": "top-k 0.1 % + EF",
}
"""Rows that run at the rate of another, and are compared with it."""


# Runs


@dataclasses.dataclass
class Program:
    """A task under a method, with all workers in one program, compiled once."""

    task: Task
    method: Method

    def __post_init__(self) -> None:
        task, method = self.task, self.method
        like = jax.eval_shape(lambda: task.params(0))
        state = jax.eval_shape(method.make(jnp.float32(0)).init, like)
        specs = fg.state_specs(state, AXIS)
        axes = jax.tree.map(lambda spec: 0 if len(spec) else None, specs)
        rows = 0 if method.local else None

        def step(params: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
            loss, grads = fg.value_and_grad(task.loss, AXIS)(params, batch)
            updates, state = method.make(rate).update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        mapped = jax.vmap(
            step, (rows, axes, 0, None), (rows, axes, 0), axis_name=AXIS, axis_size=WORKERS
        )
        split = (WORKERS, -1)

        def run(params: Params, state: Any, batch: Any, rate: jax.Array) -> Any:
            batch = jax.tree.map(lambda a: a.reshape(*split, *a.shape[1:]), batch)
            # A worker's own state has a row for each of them, of which it sees one.
            state = self.per_worker(lambda a: a[:, None], state)
            params, state, loss = mapped(params, state, batch, rate)
            return params, self.per_worker(lambda a: a[:, 0], state), loss.mean()

        self.step = jax.jit(run)
        self.forget = jax.jit(self.lose)

    def per_worker(self, change: Callable[[jax.Array], jax.Array], state: Any) -> Any:
        """The state, with a change of what each worker has of its own."""
        return jax.tree.map(
            lambda node: jax.tree.map(change, node) if is_own(node) else node,
            state,
            is_leaf=is_own,
        )

    def start(self, seed: int) -> tuple[Params, Any]:
        """The parameters and the state before the first step."""
        params = self.task.params(seed)
        return self.spread(params), self.fresh(params)

    def fresh(self, params: Params) -> Any:
        """The state before the first step."""
        state = self.method.make(jnp.float32(0)).init(params)
        return self.per_worker(lambda a: jnp.broadcast_to(a, (WORKERS, *a.shape[1:])), state)

    def spread(self, params: Params) -> Params:
        """What all have in common as the parameters of each, where each has its own."""
        if not self.method.local:
            return jax.tree.map(jnp.array, params)
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (WORKERS, *a.shape)), params)

    def lose(self, params: Params, state: Any) -> tuple[Params, Any]:
        """What is left of a checkpoint without what each worker has of its own."""
        fresh = self.fresh(self.common(params, state))
        if self.method.only:
            field = jax.tree_util.GetAttrKey(self.method.only)
            return params, jax.tree_util.tree_map_with_path(
                lambda path, old, new: new if field in path else old, state, fresh
            )
        state = jax.tree.map(
            lambda old, new: new if is_own(old) else old, state, fresh, is_leaf=is_own
        )
        return self.spread(self.common(params, state)), state

    def common(self, params: Params, state: Any) -> Params:
        """The parameters that all workers have in common."""
        return state.anchor if self.method.local else params


def is_own(node: Any) -> bool:
    """Whether each worker has its own of it."""
    return isinstance(node, fg.exchanges.PerWorker)


def run(program: Program, rate: float, seed: int, steps: int, every: int) -> dict[str, Any]:
    """One training run, with a reset after every so many steps, as a record."""
    task = program.task
    params, state = program.start(seed)
    rates = task.schedule(rate * task.rate, steps)
    losses: list[jax.Array] = []
    residuals: list[float] = []
    for count, batch in zip(range(steps), task.batches(seed), strict=False):
        if every and count and count % every == 0:
            params, state = program.forget(params, state)
        params, state, loss = program.step(params, state, batch, jnp.float32(rates(count)))
        losses.append(loss)
        if (count + 1) % max(1, steps // 8) == 0:
            residuals.append(float(fg.metrics(state)["residual"]))
    return {
        "method": program.method.name,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        "reset_every": every,
        **task.assess(program.common(params, state)),
        "training_loss": round(statistics.mean(map(float, losses[-15:])), 4),
        "residual": [round(norm, 5) for norm in residuals],
    }


# Table and figure


def labels(steps: int) -> dict[int, str]:
    """How often there are resets, by the steps between two."""
    return {0: "never", steps // 2: "once", 50: "every 50", 10: "every 10"}


def chosen(runs: list[Any]) -> dict[str, dict[int, list[Any]]]:
    """The runs of each method at its rate, by resets."""
    out: dict[str, dict[int, list[Any]]] = {}
    for record in runs:
        name = VARIANT_OF.get(record["method"], record["method"])
        tried = [r for r in runs if r["method"] == name and r["seed"] == r["reset_every"] == 0]
        if tried and record["rate"] == min(tried, key=lambda r: r["loss"])["rate"]:
            own = out.setdefault(record["method"], {})
            own.setdefault(record["reset_every"], []).append(record)
    return out


def changes(own: list[Any], base: list[Any]) -> list[float]:
    """The loss of each seed in per cent above that of the same seed in other runs."""
    by_seed = {r["seed"]: r["loss"] for r in base}
    return [100 * (r["loss"] / by_seed[r["seed"]] - 1) for r in own if r["seed"] in by_seed]


def base_of(name: str, rows: dict[str, dict[int, list[Any]]]) -> list[Any]:
    """The runs without resets that a method is compared with."""
    return rows.get(VARIANT_OF.get(name, name), {}).get(0, [])


def table(rows: dict[str, dict[int, list[Any]]], steps: int) -> Table:
    """Loss without resets, and what they add to it, seed by seed."""
    head = [f"reset {label}" for label in list(labels(steps).values())[1:]]
    out = Table("method", "rate", "loss", "to plain", *head, title=f"After {steps} steps")
    for name, own in rows.items():
        base = base_of(name, rows)
        kept = own.get(0, base)
        cells = [f"{kept[0]['rate']:g}", f"{statistics.mean(r['loss'] for r in kept):.3f}"]
        cells.append(say(changes(kept, base)) if kept is not base else "")
        cells += [say(changes(own.get(every, []), base)) for every in list(labels(steps))[1:]]
        out.add_row(name, *cells)
    return out


def say(found: list[float]) -> str:
    """The change of each seed."""
    return ", ".join(f"{change:+.1f} %" for change in found)


def draw(rows: dict[str, dict[int, list[Any]]], steps: int, path: pathlib.Path) -> None:
    """What resets add to the loss, a line a method, a dot a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 4.5))
    for index, (name, own) in enumerate(rows.items()):
        base = base_of(name, rows)
        found = {e: changes(own.get(e, base if e == 0 else []), base) for e in labels(steps)}
        found = {i: f for i, f in enumerate(found.values()) if f}
        means = [statistics.mean(f) for f in found.values()]
        colour = f"C{index}"
        axis.plot(list(found), means, "s" if len(found) == 1 else "-", color=colour, label=name)
        for at, seeds in found.items():
            axis.plot([at] * len(seeds), seeds, ".", color=colour)
    axis.set_xticks(range(len(labels(steps))), list(labels(steps).values()))
    axis.axhline(0, color="black", linewidth=1)
    axis.set(xlabel="residuals lost", ylabel="held-out loss, % above residuals that are kept")
    axis.set_yscale("symlog", linthresh=1)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is missing, and shows all that there is."""
    from _record import compact, head

    args = parse_args()
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "resets.json"
    results: Any = {**head(), "workers": WORKERS, "runs": []}
    if path.exists() and not args.smoke:
        results = json.loads(path.read_text())
    task = TASKS["lm"](args.smoke)
    programs: dict[str, Program] = {}

    def get(method: Method, rate: float, seed: int, every: int) -> Any:
        key = {
            "method": method.name,
            "rate": rate,
            "seed": seed,
            "steps": args.steps,
            "reset_every": every,
        }
        for record in results["runs"]:
            if key.items() <= record.items():
                return record
        if method.name not in programs:
            programs[method.name] = Program(task, method)
        record = run(programs[method.name], rate, seed, args.steps, every)
        results["runs"].append(record)
        path.write_text(compact(results))
        console.print({name: record[name] for name in (*key, "loss")})
        return record

    rates: dict[str, float] = {}
    listed = [m for m in methods() if not args.smoke or m.name in TRIED]
    for seed in () if args.show else range(args.seeds):
        for method in listed:
            if method.name not in rates:
                same = VARIANT_OF.get(method.name)
                tried = method.rates[:1] if args.smoke else method.rates
                best = [get(method, rate, 0, 0) for rate in (tried if same is None else ())]
                rates[method.name] = (
                    rates[same] if same else min(best, key=lambda r: r["loss"])["rate"]
                )
            for every in labels(args.steps) if method.resets else (0,):
                if every or not method.only:
                    get(method, rates[method.name], seed, min(every, args.steps // 2))
    rows = chosen(results["runs"])
    console.print(table(rows, args.steps))
    draw(rows, args.steps, args.out / FIGURE)
    console.print(f"written: {path}, {args.out / FIGURE}")


if __name__ == "__main__":
    main()
