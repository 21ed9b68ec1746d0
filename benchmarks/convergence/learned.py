"""What an autoencoder makes of the largest values of gradients, beside a quantizer of 4 bits.

A task is trained as `lgc` does while its autoencoder learns: dense for 20 steps,
then with the exact values at the positions that a leader chooses, 0.1 % of each leaf. The values of
all workers in each of these steps are kept. The autoencoder learns those of the first steps once,
as `lgc` would, or many times over, and is then asked for those of later steps, which it has not
seen. Errors are relative: of every worker's values from the leader's code and one value of
innovation, and of the mean of the workers from the mean code. Those of the quantizer are of the
leader's values.
"""

import argparse
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from methods import AXIS, Method, fixed
from run import Program
from tasks import ROOT, TASKS, WORKERS, Task

import fftgrad as fg
from fftgrad.contrib import learned

RESULTS = ROOT / "benchmarks/results/learned"
DENSE, LEARN, LATER = 20, 60, 20
"""Steps of each phase."""
FRACTION = 0.001


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", default="lm,digits", help="which tasks")
    add("--rates", default="0.001,0.01,0.1", help="of the autoencoder's descent")
    add("--turns", default="1,50", help="how often the values are learned")
    add("--out", type=pathlib.Path, default=RESULTS, help="folder for the results")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Recorded(fg.Exchange):
    """What an exchange sends of each worker, kept in its state."""

    sums: fg.Exchange

    @property
    def scope(self) -> Any:
        """That of the exchange."""
        return self.sums.scope

    def init(self, like: Any) -> Any:
        """The state of the exchange, and nothing sent."""
        size = sum(leaf.size for leaf in jax.tree.leaves(like))
        return self.sums.init(like), jnp.zeros((WORKERS, size))

    def mean(self, x: Any, state: Any, step: fg.Step, axis_name: Any) -> fg.Reduced:
        """The mean of the exchange."""
        out = self.sums.mean(x, state[0], step, axis_name)
        sent = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(out.sent)])
        rows = lax.all_gather(sent, axis_name, to="invarying")
        return out._replace(state=(out.state, rows))

    def wire_bytes(self, like: Any) -> int:
        """Those of the exchange."""
        return self.sums.wire_bytes(like)


def largest(name: str, like: Any) -> fg.Codec:
    """The codec of every leaf."""
    del name, like
    return fg.TopK(FRACTION)


def recorded(task: Task, mesh: Mesh) -> np.ndarray:
    """The values of all workers at the support of each step, float32[steps, workers, k]."""
    exchange = Recorded(fg.SharedSupport(largest))
    schedule = fg.Scheduled({0: fg.AllReduce(), DENSE: exchange})
    tx = fg.compressed_pmean(schedule, fg.ErrorFeedback(), axis_name=AXIS)
    steps = DENSE + LEARN + LATER
    program = Program(task, Method("recorded", fixed(tx), momentum=False), steps, mesh)
    params, batches, rates = program.params(0), task.batches(0), task.schedule(task.rate, 200)
    state, found = program.init(params), list[np.ndarray]()
    for count in range(steps):
        batch = jax.device_put(next(batches), program.spread)
        rate = jax.device_put(jnp.float32(rates(count)), NamedSharding(mesh, P()))
        params, state, _ = program.step(params, state, batch, rate)
        if count >= DENSE:
            rows = np.asarray(state[0].exchange[0][1][1])
            found.append(rows[:, np.any(rows != 0, axis=0)])
    k = min(rows.shape[1] for rows in found)  # a value that is zero on all is not seen
    return np.stack([rows[:, :k] for rows in found])


def taught(rows: jax.Array, *, variant: str, rate: float, turns: int) -> list[float]:
    """The errors of the last learned steps, and of those that come later."""
    net, pick = learned.Autoencoder(), fg.TopK(k=1) if variant == "leader" else None

    def learn(params: Any, item: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        number, values = item
        return learned.learn(net, params, values, number % WORKERS, pick, rate)

    def error(params: Any, item: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, values = item
        return learned.learn(net, params, values, number % WORKERS, pick, 0.0).error

    numbers = jnp.arange(len(rows), dtype=jnp.int32)
    items = (numbers, rows)
    seen = jax.tree.map(lambda a: a[:LEARN], items)

    @jax.jit
    def run(seen: Any, items: Any) -> jax.Array:
        def turn(_: jax.Array, params: Any) -> Any:
            return lax.scan(learn, params, seen)[0]

        params = lax.fori_loop(0, turns, turn, net.init())
        return lax.map(lambda item: error(params, item), items)

    found = np.asarray(run(seen, items))
    return [float(np.mean(found[LEARN - 10 : LEARN])), float(np.mean(found[LEARN:]))]


def quantized(rows: jax.Array, codec: fg.Codec) -> float:
    """The error of the leaders' values through a codec, in the later steps."""

    def error(values: jax.Array) -> jax.Array:
        back = fg.decompress(codec, fg.compress(codec, values), values)
        return jnp.linalg.norm(values - back) / jnp.linalg.norm(values)

    leaders = jnp.stack([rows[i, i % WORKERS] for i in range(LEARN, len(rows))])
    return float(jnp.mean(lax.map(error, leaders)))


def main() -> None:
    """Records, learns, and writes what came of it."""
    from _record import head, text

    args = parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * WORKERS))
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = Mesh(np.array(jax.devices("cpu")[:WORKERS]), (AXIS,), axis_types=(AxisType.Auto,))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "errors.json"
    results: dict[str, Any] = {**head(), "steps": [DENSE, LEARN, LATER], "errors": []}
    for task in (TASKS[name](False) for name in args.tasks.split(",")):
        rows = jnp.asarray(recorded(task, mesh))
        bits = {f"LogLevels({b})": quantized(rows, fg.LogLevels(bits=b)) for b in (2, 3, 4)}
        for name, error in bits.items():
            results["errors"].append({"task": task.name, "code": name, "later": error})
            print(results["errors"][-1], flush=True)
        for variant in ("leader", "all_reduce"):
            for turns in map(int, args.turns.split(",")):
                for rate in map(float, args.rates.split(",")):
                    last, later = taught(rows, variant=variant, rate=rate, turns=turns)
                    record = {"task": task.name, "code": variant, "k": rows.shape[2]}
                    record |= {"rate": rate, "turns": turns, "learned": last, "later": later}
                    results["errors"].append(record)
                    print(record, flush=True)
                    path.write_text(text(results, "errors"))
    path.write_text(text(results, "errors"))
    print(json.dumps(results["errors"][-1]))


if __name__ == "__main__":
    main()
