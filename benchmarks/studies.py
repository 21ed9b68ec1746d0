"""The studies of `convergence.py`: what is trained with which methods.

A study is an entry of `STUDIES`: rows, tasks, steps, seeds, learning rates, and the table of its
results.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tables
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from methods import AXIS, ENDS, FOUNDING, METHODS, SECONDS, Method, Setting, Transformation
from program import Program
from tasks import WORKERS, Params, Task


def errors(task: Task, rows: list[Method], mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The relative error of the mean of one gradient, without memory, of each method.

    The gradient is that of a dense run after 50 steps; none for methods whose updates are no mean.
    """
    rows = [row for row in rows if row.exchange is not None and row.directs is None]
    if not rows:
        return
    program, batches = Program(task, METHODS[0], 50, mesh), task.batches(0, mesh.size)
    at = program.fresh(task.params(0))
    for batch in itertools.islice(batches, 50):
        at, _ = program.step(at, batch, task.rate / 2)
    apart = jax.tree.map(lambda a: a.reshape(mesh.size, -1, *a.shape[1:]), next(batches))
    own = jax.jit(jax.vmap(jax.grad(task.loss), (None, 0)))(at.params, apart)
    exact = jax.tree.map(lambda g: g.mean(0), own)
    for row in rows:
        tx = row.mean(Setting(mesh.size, 50))

        def mean(rows: Params, tx: Transformation = tx) -> Params:
            own = jax.tree.map(lambda g: g[0], rows)
            return tx.update(own, tx.init(own))[0]

        mapped = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        difference = jax.tree.map(jnp.subtract, jax.jit(mapped)(own), exact)
        yield row.name, float(optax.tree.norm(difference) / optax.tree.norm(exact))


@dataclasses.dataclass(frozen=True)
class Study:
    """Rows, and how each is run and shown."""

    folder: str  # of the result file, in `benchmarks/results`
    file: str  # its name; empty for one by the number of steps
    rows: list[Method]  # what is trained with
    tables: Callable[[dict[str, Any]], str]  # of the results, in Markdown
    tasks: tuple[str, ...] = ("lm",)  # names of what is trained
    steps: int = 200
    seeds: int = 2
    workers: int = WORKERS
    # learning rates tried on the first seed, in units of the task's own
    rates: tuple[float, ...] = (1.0,)
    inside: bool = False  # whether others are tried until the best has a neighbour on both sides
    devices: bool = True  # whether the workers are devices, and not rows of one device's arrays
    curve: bool = False  # whether held-out losses are kept by step
    # of the rows on a task, what is asked without a run
    errors: Callable[[Task, list[Method], Mesh], Iterator[tuple[str, float]]] | None = None
    figures: tuple[Callable[[dict[str, Any]], Figure], ...] = ()  # drawn of the results
    smoke: tuple[str, ...] = ()  # the rows of a smoke run


SWEEP = (0.5, 1.0, 2.0)
LOSS_AT_THE_END = Study(
    "convergence",
    "ends",
    ENDS,
    tables.ends,
    tasks=("photographs", "names", "nnx", "fine-tuning"),
    steps=1000,
    rates=SWEEP,
    inside=True,
    devices=False,
    smoke=("dense, Adam", "100x, Muon, lead 0.5", "4 local steps of Adam, 25x"),
)
FOUNDING_PAPERS = dataclasses.replace(
    LOSS_AT_THE_END,
    file="seeds",
    rows=FOUNDING,
    tables=tables.founding,
    tasks=("photographs", "names"),
    rates=(2.0, 4.0),
    smoke=("FFT 64, 30x, Muon, lead 0.3",),
)
STUDIES: dict[str, Study] = {
    # Every method on tuning tasks: the frontier of bytes and loss.
    "methods": Study(
        "convergence",
        "",
        METHODS,
        tables.every_method,
        tasks=("lm", "digits"),
        rates=SWEEP,
        errors=errors,
        smoke=("dense", "PowerSGD rank 1"),
    ),
    # The loss at the end on held-out tasks. The rate of each row, dense too, is swept by factors of
    # two until the best has a worse one on both sides. Dense is the better of Adam and Muon.
    "ends": LOSS_AT_THE_END,
    # The founding papers' codecs before Adam, as published, and before Muon.
    "seeds": FOUNDING_PAPERS,
    # How a model of 5.4 million parameters learns, by step; `slow_network.py --workload large` says
    # how long a step takes over a link. No setting was chosen on this task.
    "seconds": Study(
        "convergence",
        "seconds",
        SECONDS,
        tables.seconds,
        tasks=("large",),
        steps=1000,
        seeds=1,
        workers=4,
        rates=SWEEP,
        devices=False,
        curve=True,
        figures=(tables.seconds_to_end, tables.hero),
        smoke=("dense, Adam", "two stages 25x, Muon, lead 0.3"),
    ),
}
