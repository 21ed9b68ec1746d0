"""A process of `islands.py`: an island, an island that only exchanges, or a rank of one program."""

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tasks import TASKS, Task

import fftgrad as fg

AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is told.

    Attributes:
      role: "train", "exchange" or "program".
      name: of the island, or of the rank.
      number: of the island or the rank, from 0.
      store: URL, or the address of the program's first rank.
      folder: where it writes, and where the file `end` says that it is over.
      islands: how many there are.
      every: inner steps of a round; of a program, steps between checkpoints.
      deadline: of a round, in seconds.
      pace: seconds that a step takes at least.
      rate: of Adam, the inner optimizer.
      seed: of parameters and batches.
      values: parameters of an island that only exchanges.
      rounds: after which that ends.
      smoke: whether all is tiny.
    """

    role: str
    name: str
    number: int
    store: str
    folder: str
    islands: int = 4
    every: int = 15
    deadline: float = 10.0
    pace: float = 0.1
    rate: float = 2e-3
    seed: int = 0
    values: int = 0
    rounds: int = 0
    smoke: bool = False

    def dumps(self) -> str:
        """The job as a command-line argument."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def settings(self) -> fg.islands.Settings:
        """The settings of its run."""
        codec = fg.chain(fg.TopK(fraction=0.03), fg.LogLevels(bits=4))
        return fg.islands.Settings(
            fg.AllGather(codec, clip_to_median=True),
            every=1 if self.role == "exchange" else self.every,
            rate=1.0,
            islands=self.islands,
            deadline=self.deadline,
        )


class Log:
    """Lines of JSON in a file, to which those of a later start are added."""

    def __init__(self, job: Job) -> None:
        self.file = (pathlib.Path(job.folder) / f"{job.name}.jsonl").open("a", buffering=1)

    def write(self, **record: Any) -> None:
        """A line, and when it was written."""
        self.file.write(json.dumps({"time": time.time(), **record}) + "\n")


def is_over(job: Job) -> bool:
    """Whether the supervisor has said so."""
    return (pathlib.Path(job.folder) / "end").exists()


def inner(job: Job, task: Task, *before: optax.GradientTransformation) -> tuple[Any, Any]:
    """The inner optimizer, and its step."""
    tx = optax.chain(*before, optax.adam(job.rate, b2=0.99))

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(task.loss)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    return tx, step


def train(job: Job, log: Log) -> None:
    """An island, until all have had so many tokens together as they should."""
    task = TASKS["lm"](job.smoke)
    first = task.params(job.seed)
    tx, own = inner(job, task)
    step: Any = jax.jit(own)
    state, batches = tx.init(first), task.batches((job.seed, time.time_ns() % 2**32), 1)
    size = int(np.prod(next(batches)[0].shape))
    step(first, state, next(batches))  # compiles it
    place, settings, delay = job.store, job.settings, min(3, job.every - 1)
    with fg.islands.Island(
        place, job.name, first, settings=settings, delay=delay, blend=0.5
    ) as island:
        params = island.params
        log.write(joined=island.round)
        while not is_over(job):
            begin = time.monotonic()
            params, state, loss = step(params, state, next(batches))
            computed = time.monotonic()
            params = island.step(params, weight=size, loss=loss[0])
            waited = time.monotonic() - computed
            log.write(step=size, round=island.round, loss=float(loss[0]), island_s=waited)
            time.sleep(max(0.0, begin + job.pace - time.monotonic()))
        common = island.finish()
        counted = sum(outcome.counted for outcome in island.outcomes)
        end: dict[str, Any] = {"end": island.round, "digest": island.digest, "counted": counted}
        log.write(**end, **island.traffic, **task.assess(common))


def exchange(job: Job, log: Log) -> None:
    """An island that learns nothing, so that a round is its exchange alone."""
    rng, params = np.random.default_rng(job.number), jnp.zeros(job.values)
    with fg.islands.Island(job.store, job.name, params, settings=job.settings) as island:
        params = island.params
        for _ in range(job.rounds):
            moved = np.asarray(params) + rng.standard_normal(job.values).astype(np.float32)
            before, begin = island.traffic, time.monotonic()
            params = island.step(jnp.asarray(moved))
            seconds = time.monotonic() - begin
            used = {kind: count - before[kind] for kind, count in island.traffic.items()}
            log.write(round=island.round, seconds=seconds, **used)
        log.write(end=island.round, digest=island.digest)


def program(job: Job, log: Log) -> None:
    """A rank of one program, which averages gradients at each step and saves its state."""
    jax.distributed.initialize(job.store, job.islands, job.number, heartbeat_timeout_seconds=10)
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    task = TASKS["lm"](job.smoke)
    mesh = jax.make_mesh((job.islands,), (AXIS,), axis_types=(AxisType.Auto,))
    # In one vector, and one collective: one for each leaf would take as many round trips.
    tx, own = inner(job, task, fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS))
    ins, outs = (P(), P(), P(AXIS)), (P(), P(), P(AXIS))
    step = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))
    batches = task.batches((job.seed, time.time_ns() % 2**32), 1)
    saved = pathlib.Path(job.folder) / "checkpoint.npz"
    params = task.params(job.seed)
    leaves, structure = jax.tree.flatten((params, tx.init(params)))
    if saved.exists():
        with np.load(saved) as file:
            leaves = [file[name] for name in file.files]
    tree = jax.tree.unflatten(structure, leaves)
    params, state = jax.device_put(tree, NamedSharding(mesh, P()))
    place = NamedSharding(mesh, P(AXIS))
    count = 0
    while True:
        begin, parts = time.monotonic(), next(batches)
        batch = tuple(jax.make_array_from_process_local_data(place, part) for part in parts)
        params, state, losses = step(params, state, batch)
        loss = float(losses.addressable_shards[0].data[0])
        log.write(step=int(parts[0].size), loss=loss, seconds=time.monotonic() - begin)
        count += 1
        if count % job.every == 0:
            over = multihost_utils.broadcast_one_to_all(np.int32(is_over(job)))
            if job.number == 0:
                part = saved.with_suffix(".part.npz")
                np.savez(part, *map(np.asarray, jax.tree.leaves((params, state))))
                part.replace(saved)
                log.write(saved=count)
            if over:
                break
        time.sleep(max(0.0, begin + job.pace - time.monotonic()))
    if job.number == 0:
        log.write(end=count, digest="", **task.assess(jax.tree.map(np.asarray, params)))


ROLES = {"train": train, "exchange": exchange, "program": program}

if __name__ == "__main__":
    told = Job(**json.loads(sys.argv[1]))
    ROLES[told.role](told, Log(told))
