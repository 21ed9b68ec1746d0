"""What it does to training to compress what is sharded over the workers themselves.

The language model of `tasks.py` with 8 workers under Adam, at one rate: replicated and dense, with
the optimizer's state sharded (ZeRO-2), and with the parameters sharded (ZeRO-3). The bytes are
those that a worker sends over a ring, from the compiled program.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table
from tasks import ROOT, TASKS, WORKERS, Params, Task

import fftgrad as fg

AXIS = "data"
RATE = 0.5
"""In units of the task's own; there is no schedule."""
FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformLevels(4, bucket=256, norm="max"))
EIGHT = fg.UniformLevels(8, bucket=256, norm="max")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/sharded")
    add("--steps", type=int, default=200, help="optimizer steps of each run")
    add("--seeds", type=int, default=2, help="how many seeds")
    add("--smoke", action="store_true", help="a few steps of a tiny model")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.seeds = 4, 1
    return args


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to share the work of the optimizer.

    Attributes:
      sharded: "", the optimizer's "state", or the "parameters".
      gradients: what encodes the gradients' shards.
      parameters: what encodes the way back; None sends the parameters themselves.
    """

    name: str
    sharded: str = ""
    gradients: fg.Codec = FOUR
    parameters: fg.Codec | None = EIGHT


WAYS = (
    Way("replicated, dense"),
    Way("ZeRO-2, nothing lost", "state", fg.Identity(), fg.Identity()),
    Way("ZeRO-2, 8 and 8 bits", "state", EIGHT),
    Way("ZeRO-2, 4 and 8 bits", "state"),
    Way("ZeRO-2, 4 and 4 bits", "state", parameters=FOUR),
    Way("ZeRO-3, 4 bits back", "parameters", parameters=None),
    Way("ZeRO-3, 4 back, 8 forth", "parameters"),
)


class Program:
    """A task in one of the ways, compiled once."""

    def __init__(self, task: Task, way: Way, mesh: Mesh) -> None:
        self.task, self.mesh, self.way = task, mesh, way
        self.inner = optax.adam(RATE * task.rate, b2=0.99)
        dense = optax.chain(fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS), self.inner)
        codecs: Any = {"gradients": way.gradients, "parameters": way.parameters}
        self.gather: Any = codecs
        of_shards = way.sharded == "parameters"
        self.tx = (
            fg.optimizers.sharded(self.inner, WORKERS, axis_name=AXIS, **codecs)
            if way.sharded == "state"
            else dense
        )
        params = task.params(0)
        state = self.init(params)
        if of_shards:
            specs_of: Any = optax.ScaleByAdamState  # whose fields are specs here, not arrays
            moments = specs_of(count=P(), mu=P(AXIS), nu=P(AXIS))
            specs = (P(AXIS), (moments, *(P() for _ in state[1:])))
            mapped = jax.shard_map(
                self._step_of_shards, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=specs
            )
            step: Any = jax.jit(mapped)
        else:
            step = fg.data_parallel(self._step_of_copies, mesh, AXIS)
        self.step = step.lower(params, state, next(task.batches(0))).compile()

    def init(self, params: Params) -> Any:
        """The state before the first step."""
        if self.way.sharded == "parameters":
            return self.inner.init(params)
        return fg.init_state(self.tx, params, self.mesh, AXIS)

    def _step_of_copies(self, params: Params, state: Any, batch: Any) -> Any:
        _, grads = fg.value_and_grad(self.task.loss, AXIS)(params, batch)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def _step_of_shards(self, shards: Params, state: Any, batch: Any) -> Any:
        def loss(shards: Params) -> jax.Array:
            leaves, structure = jax.tree.flatten(shards)
            whole = [
                fg.optimizers.gather_parameters(
                    leaf, AXIS, step=state[0].count, key=i, **self.gather
                )
                for i, leaf in enumerate(leaves)
            ]
            return self.task.loss(jax.tree.unflatten(structure, whole), batch) / WORKERS

        updates, state = self.inner.update(jax.grad(loss)(shards), state, shards)
        return optax.apply_updates(shards, updates), state


def run(program: Program, seed: int, steps: int) -> dict[str, Any]:
    """One training run, as a record."""
    task = program.task
    params: Any = task.params(seed)
    state = program.init(params)
    for batch in itertools.islice(task.batches(seed), steps):
        params, state = jax.block_until_ready(program.step(params, state, batch))
    dense = 2 * 4 * sum(p.size for p in jax.tree.leaves(params)) * (WORKERS - 1) // WORKERS
    sent = sum(c.link_bytes(WORKERS) for c in fg.audit(program.step))
    state_bytes = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in jnp.asarray(leaf).addressable_shards[:1]
    )
    return {
        "way": program.way.name,
        "seed": seed,
        "steps": steps,
        **task.assess(jax.device_get(params)),
        "link_bytes": sent,
        "ratio": dense / sent,
        "state_bytes": state_bytes,
    }


def main() -> None:
    """Runs all ways, writes JSON, and shows a table."""
    from _record import head, text

    args = parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = Mesh(np.array(jax.devices("cpu")[:WORKERS]), (AXIS,), axis_types=(AxisType.Auto,))
    console, task = Console(), TASKS["lm"](args.smoke)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "lm.json"
    runs: list[dict[str, Any]] = []
    table = Table("way", "loss of each seed", "to dense", "link bytes", "to float32", "state bytes")
    for way in WAYS:
        program = Program(task, way, mesh)
        found = [run(program, seed, args.steps) for seed in range(args.seeds)]
        runs += found
        path.write_text(text({**head(), "workers": WORKERS, "runs": runs}, "runs"))
        changes = [own["loss"] / base["loss"] - 1 for own, base in zip(found, runs, strict=False)]
        table.add_row(
            way.name,
            ", ".join(f"{own['loss']:.3f}" for own in found),
            ", ".join(f"{change:+.1%}" for change in changes),
            f"{found[0]['link_bytes']:,.0f}",
            f"{found[0]['ratio']:.1f}",
            f"{found[0]['state_bytes']:,}",
        )
    console.print(table)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
