"""The studies of `convergence.py`: what is trained with which methods, and what is asked of a run.

A study is a line of `STUDIES`: rows, tasks, steps, seeds, learning rates, and the table of its
results. A `Column` asks more of each run than its loss and its bytes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tables
from _record import POINTS
from held_out import HELD_OUT, tuned
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from methods import (
    AXIS,
    BY_NAME,
    DECAYED,
    DENSE,
    ENDS,
    FEEDBACK,
    FOUNDING,
    LEARNERS,
    METHODS,
    ROWS,
    SECONDS,
    SHARED,
    Method,
    Setting,
    Transformation,
    diloco,
    fed_back,
    gradients_of,
    onlooker,
    plain,
    renamed,
    watched,
)
from program import Column, Point, Program, Reset
from tables import LOCAL, MILLE, TOP_K, VARIANTS, often
from tasks import WORKERS, Batch, Params, Schedule, Task, constant

import fftgrad as fg

# What is asked of a run


class Curve(Column):
    """Held-out losses by step, twenty times in a run."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.every = max(1, program.setting.steps // 20)
        self.losses: list[list[float]] = []

    def see(self, count: int, before: Point, after: Point) -> None:
        """Assesses the parameters now and then."""
        if count % self.every == 0:
            loss = self.program.task.assess(self.program.common(after))["loss"]
            self.losses.append([count, round(loss, 4)])

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """The curve."""
        return {"assessed": self.losses}


class FineTuned(Column):
    """The held-out loss after a dense fine-tuning, on 100 kB of NumPy's source."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Of what all workers have in common."""
        smoke = self.program.setting.steps < 100
        task, params = HELD_OUT["fine-tuning"](smoke), self.program.common(end)
        after = tuned(task, params, 2 if smoke else 300, 16)
        return {"before": task.assess(params)["loss"], "after": task.assess(after)["loss"]}


class Bytes(Column):
    """Over a worker's link, and of its state."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Both, and how many times less than float32 crosses a link."""
        workers = self.program.mesh.size
        count = sum(p.size for p in jax.tree.leaves(end.params))
        sent = sum(c.link_bytes(workers) for c in fg.audit(self.program.compiled))
        own = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(end.state)]
        dense = 2 * 4 * count * (workers - 1) // workers
        return {"link_bytes": sent, "ratio": dense / sent, "state_bytes": sum(own)}


CHUNK = 50
"""Values for each one that ScaleCom sends."""


class Similarity(Column):
    """How alike the vectors are that the workers of ScaleCom choose from, after a run."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Cosines between two workers, overlap of choices, and the energy that a choice loses."""
        if not self.program.method.name.startswith("ScaleCom"):
            return {}
        next_one, _ = self.program.step(end, batch, 0.0)
        residuals = gathered(optax.tree.get(end.state, "residual"))
        added = residuals + gathered(gradients_of(next_one.state))
        alike = {"residuals": mean_cosine(residuals), "cosine": mean_cosine(added)}
        return alike | chosen_by(added)


def gathered(tree: Any) -> np.ndarray:
    """A row for each worker."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def mean_cosine(vectors: np.ndarray) -> float:
    """The mean over all pairs."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return float(np.mean([a @ b for a, b in itertools.combinations(unit, 2)]))


def chosen_by(vectors: np.ndarray) -> dict[str, float]:
    """Overlap of a worker's choice with that of the mean, and the energy of the mean each loses."""
    mean = vectors.mean(0)
    k = -(-mean.size // CHUNK)
    best, *chosen = (np.argpartition(np.abs(row), -k)[-k:] for row in (mean, *vectors))

    def lost(support: np.ndarray) -> float:
        return float(1 - np.sum(mean[support] ** 2) / np.sum(mean**2))

    return {
        "overlap": float(np.mean([np.isin(own, best).mean() for own in chosen])),
        "lost": float(np.mean([lost(own) for own in chosen])),
        "least": lost(best),
    }


EVERY, RATE, DGC = 10, 0.1, "DGC 5 %"
"""Of the study of endurance."""


class Endures(Column):
    """What has to hold for as long as a training runs, at some points of the run.

    Whether all workers hold the same bits, how long the residuals and their mean are, and how far

        sum of what was applied + mean residual - sum of the mean gradients

    is from zero, relative to the last sum and added up in float64.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        size = sum(leaf.size for leaf in jax.tree.leaves(program.task.params(0)))
        self.wanted, self.applied = np.zeros((2, size))
        self.equal, self.points = True, list[dict[str, Any]]()

    def see(self, count: int, before: Point, after: Point) -> None:
        """Adds up, and looks where it is time."""
        given = gathered(gradients_of(after.state))
        if self.program.method.own:
            anchor = whole(self.program.common(before))
            applied = anchor - whole(self.program.common(after))
            # As the workers compute it, or the rounding of a step would count as lost.
            own = np.float32(gathered(before.params)) - np.float32(RATE) * np.float32(given)
            given = (count % EVERY == 0) * (anchor - own)
        else:
            applied = whole(optax.tree.get(after.state, "applied"))
        self.wanted += given.mean(0)
        self.applied += applied
        steps = self.program.setting.steps
        if count % max(1, steps // (2 * POINTS)) == 0:
            shared = self.program.common(after)
            self.equal &= all(same_bits(leaf) for leaf in jax.tree.leaves(shared))
        if count % max(1, steps // POINTS) == 0:
            self.points.append(self.look(count, after.state))

    def look(self, count: int, state: Any) -> dict[str, Any]:
        """One point."""
        left, found = kept(state), fg.metrics(state)
        size = np.linalg.norm(self.wanted) or 1.0
        gap = np.linalg.norm(self.applied + left - self.wanted) / size
        return {
            "step": count,
            "residual": float(f"{float(found['residual']):.4g}"),
            "mean_residual": float(f"{np.linalg.norm(left):.4g}"),
            "telescoping": None if self.program.method.name == DGC else float(f"{gap:.3g}"),
        }

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """All points, by what they have."""
        curves = {name: [point[name] for point in self.points] for name in self.points[0]}
        return {"replicas_equal": self.equal, **curves}


def whole(tree: Any) -> np.ndarray:
    """All leaves in one vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def kept(state: Any) -> np.ndarray:
    """What is still to be applied: the mean residual, and that of the owners of shards."""
    found = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, fg.training.CompressedPmeanState)
    )
    (pmean,) = (node for node in found if isinstance(node, fg.training.CompressedPmeanState))

    def residuals(tree: Any) -> list[jax.Array]:
        field = jax.tree_util.GetAttrKey("residual")
        return [leaf for path, leaf in jax.tree.leaves_with_path(tree) if field in path]

    total = gathered(residuals(pmean.memory)).mean(0)
    for owned in residuals(pmean.exchange):
        total += np.asarray(owned, np.float64).ravel()
    return total


def same_bits(leaf: jax.Array) -> bool:
    """Whether all devices hold the same bits."""
    return len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def errors(task: Task, rows: list[Method], mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The relative error of the mean of one gradient, without memory, of each method.

    The gradient is that of a dense run after 50 steps; none for methods whose updates are no mean.
    """
    rows = [row for row in rows if row.exchange is not None and row.directs is None]
    if not rows:
        return
    program = Program(task, watched(METHODS[0]), 50, mesh)
    batches, at = task.batches(0, mesh.size), program.fresh(task.params(0))
    for batch in itertools.islice(batches, 51):
        at, _ = program.step(at, batch, task.rate / 2)
    own = gradients_of(at.state)
    exact = jax.tree.map(lambda g: g.mean(0), own)
    for row in rows:
        tx = row.mean(Setting(mesh.size, 50))

        def mean(rows: Params, tx: Transformation = tx) -> Params:
            own = jax.tree.map(lambda g: g[0], rows)
            return tx.update(own, tx.init(own))[0]

        mapped = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        difference = jax.tree.map(jnp.subtract, jax.jit(mapped)(own), exact)
        yield row.name, float(optax.tree.norm(difference) / optax.tree.norm(exact))


# Rows of one study alone


CUT = 130 / 180
"""The share of the steps after which the FFT paper's rate falls to a tenth."""


def rows_of_claims() -> Iterator[Method]:
    """The FFT paper's thetas, of which two end with nothing dropped; and ScaleCom's filter."""
    yield ROWS["dense"]
    for share in (0.5, 0.7, 0.85, 0.9, 0.99):
        yield Method(f"theta {share}", fg.methods.fft_sparsification(share))
    for share in (0.9, 0.99):

        def make(setting: Setting, share: float = share) -> fg.Recipe:
            end = {round(CUT * setting.steps): 0.0}
            return fg.methods.fft_sparsification(share, theta_schedule=end)

        yield Method(f"theta {share}, then 0", make, phases=((CUT, (0,)),), later=(1,))
    for beta in (1.0, 0.1):
        own = fg.methods.scalecom(CHUNK, beta)
        yield watched(fed_back(f"ScaleCom, beta {beta}", own))


def cut(peak: float, steps: int) -> Callable[[int], Any]:
    """A constant rate that falls to a tenth once."""
    return optax.piecewise_constant_schedule(peak, {round(CUT * steps): 0.1})


def rows_of_resets() -> Iterator[Method]:
    """Methods whose residuals are lost now and then, and others with another memory."""
    shares, kinds = {TOP_K: 0.01, MILLE: 0.001}, list[Method]()
    memories = {
        "": fg.ErrorFeedback(),
        ", bfloat16": fg.ErrorFeedback(dtype="bfloat16"),
        ", decay 0.95": fg.ErrorFeedback(decay=0.95),
    }
    for end, memory in memories.items():
        for name, share in shares.items():
            kinds.append(fed_back(name + end, fg.methods.top_k(share, memory=memory)))
    local = (
        diloco(name, 8, lambda _: fg.Recipe(SPARSE, DECAYED))
        for name in (LOCAL, "diloco, residual only")
    )
    return itertools.chain(kinds[:2], [plain(ROWS["signSGD + EF"])], local, kinds[2:])


SPARSE = fg.AllGather(fg.chain(fg.TopK(0.03), fg.LogQuantizer(4)))


def resets_of(method: Method, steps: int) -> tuple[Reset, ...]:
    """All of them, for rows that are no variant; of the residual alone, those that are resets."""
    each = [min(every, steps // 2) for every in often(steps)]
    if method.name == "diloco, residual only":
        return tuple(Reset(every, "residual") for every in each[1:])
    return tuple(Reset(every) for every in each[: 1 if method.name in VARIANTS else None])


FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformQuantizer(4, bucket=256, norm="max"))
EIGHT = fg.UniformQuantizer(8, bucket=256, norm="max")


def of_state(name: str, gradients: fg.Codec, parameters: fg.Codec) -> Method:
    """Shards of the optimizer's state; what encodes gradients, and parameters on their way back."""

    def around(setting: Setting, inner: Transformation) -> Transformation:
        codecs: Any = {"gradients": gradients, "parameters": parameters}
        return fg.optimizers.sharded(inner, setting.workers, axis_name=AXIS, **codecs)

    return Method(name, around=around)


def of_parameters(name: str, parameters: fg.Codec | None) -> Method:
    """Shards of the parameters; without a codec they are gathered as they are."""
    codecs = {"gradients": FOUR, "parameters": parameters}
    return Method(name, around=lambda _, inner: inner, shards=codecs)


class Applied(NamedTuple):
    """The state of what looks on behind an exchange."""

    applied: Any


def descent(name: str, exchange: fg.Recipe, scale: float = 1.0) -> Method:
    """Plain descent behind an exchange; what it applies is kept in the state."""
    mean = fg.compressed_pmean(exchange, axis_name=AXIS)
    seen = optax.chain(mean, optax.scale(scale), onlooker(Applied))
    return watched(fed_back(name, seen, corrects=True))


def feedback(
    name: str, exchange: fg.Exchange | fg.Codec, scope: Literal["leaf"] | None = None, **kept: Any
) -> Method:
    """A method with feedback that forgets nothing."""
    exchange = fg.AllGather(exchange) if isinstance(exchange, fg.Codec) else exchange
    return descent(name, fg.Recipe(exchange, fg.ErrorFeedback(**kept), fg.Bucketing(scope)))


def rows_of_endurance() -> list[Method]:
    """One method of each family."""
    top_k, bits, workers = fg.TopK(fraction=0.05), fg.RangeFloat(bits=8), 4
    local = diloco("diloco, 10 local steps", EVERY, lambda _: fg.Recipe(SPARSE, FEEDBACK))
    return [
        feedback("top-k 5 %", top_k),
        feedback("top-k 5 %, bfloat16 residual", top_k, dtype="bfloat16"),
        feedback("FFT 16, 10 %, 8 bits", fg.chain(fg.Fft(16), fg.TopK(0.1), bits)),
        feedback("signs", fg.Sign(), "leaf"),
        feedback("EDEN 2 bits", fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2))),
        feedback("PowerSGD rank 2", fg.PowerSgd(rank=2), "leaf"),
        feedback("two stages, top-k 5 %", fg.TwoStage(fg.chain(top_k, bits), workers)),
        feedback("shared top-k 5 %", fg.LeaderTopK(top_k)),
        feedback("integer sum, 7 levels", fg.QuantizedAllReduce(workers, levels=7)),
        feedback("budget 30x", fg.Budget(ratio=30)),
        descent(DGC, fg.methods.dgc(0.05), scale=0.1),
        watched(dataclasses.replace(local, momentum=False, corrects=True)),
    ]


# Studies


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
    # of some rows, those rates in place of all
    known: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict[str, Any])
    # rows that run at the rate of another, and are compared with it
    variants: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    # those of a row in so many steps; the first is for choosing the rate
    resets: Callable[[Method, int], tuple[Reset, ...]] = lambda *_: (Reset(),)
    schedule: Schedule | None = None  # of the learning rate, where it is not the task's own
    column: type[Column] = Column  # what else is asked of a run
    # of the rows on a task, what is asked without a run
    errors: Callable[[Task, list[Method], Mesh], Iterator[tuple[str, float]]] | None = None
    figures: tuple[Callable[[dict[str, Any]], Figure], ...] = ()  # drawn of the results
    smoke: tuple[str, ...] = ()  # the rows of a smoke run, and its steps
    few: int = 4


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
        figures=(tables.frontier,),
        smoke=("dense", "PowerSGD rank 1"),
    ),
    # The loss at the end on held-out tasks. The rate of each row, dense too, is swept by factors of
    # two until the best has a worse one on both sides. Dense is the better of Adam and Muon.
    "ends": LOSS_AT_THE_END,
    # The founding papers' codecs before Adam, as published, and before Muon.
    "seeds": FOUNDING_PAPERS,
    "seeds-64": dataclasses.replace(
        FOUNDING_PAPERS,
        file="seeds-64",
        rows=LEARNERS,
        tables=tables.learners,
        steps=150,
        workers=64,
        smoke=(*DENSE, SHARED[0].name),
    ),
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
        column=Curve,
        figures=(tables.seconds_to_end, tables.hero),
        smoke=("dense, Adam", "two stages 25x, Muon, lead 0.3"),
    ),
    # Whether a model trained at fewer bytes is worse to begin from, at the same loss. Dense runs of
    # several lengths tell how the loss after fine-tuning follows from the loss before.
    "downstream": Study(
        "convergence",
        "downstream",
        [BY_NAME[name] for name in (*DENSE, "100x, Muon, lead 0.5", "4 local steps of Adam, 25x")],
        tables.downstream,
        tasks=("pretraining",),
        steps=1000,
        seeds=1,
        devices=False,
        column=FineTuned,
        smoke=(DENSE[0], "4 local steps of Adam, 25x"),
    ),
    # The FFT paper: a theta that goes to zero where the learning rate falls trains as dense does.
    # ScaleCom: the residuals of the workers are alike, so what one finds large is large for all.
    "claims": Study(
        "papers",
        "training",
        list(rows_of_claims()),
        tables.claims,
        tasks=("digits", "lm"),
        schedule=cut,
        column=Similarity,
        smoke=("dense", "theta 0.5", "theta 0.9, then 0", "ScaleCom, beta 1.0"),
    ),
    # What it costs to lose what each worker has of its own, and to keep it in bfloat16.
    "resets": Study(
        "resets",
        "resets",
        list(rows_of_resets()),
        tables.resets,
        steps=400,
        rates=SWEEP,
        known={TOP_K: (0.5,), "signSGD + EF, no momentum": (1.0,)},
        variants=VARIANTS,
        resets=resets_of,
        smoke=(TOP_K, LOCAL, f"{TOP_K}, bfloat16"),
    ),
    # Adam replicated, with its state sharded (ZeRO-2), and with the parameters sharded (ZeRO-3).
    "sharded": Study(
        "sharded",
        "lm",
        [
            renamed("replicated, dense", "dense"),
            of_state("ZeRO-2, nothing lost", fg.Identity(), fg.Identity()),
            of_state("ZeRO-2, 8 and 8 bits", EIGHT, EIGHT),
            of_state("ZeRO-2, 4 and 8 bits", FOUR, EIGHT),
            of_state("ZeRO-2, 4 and 4 bits", FOUR, FOUR),
            of_parameters("ZeRO-3, 4 bits back", None),
            of_parameters("ZeRO-3, 4 back, 8 forth", EIGHT),
        ],
        tables.sharded,
        rates=(0.5,),
        schedule=constant,
        column=Bytes,
        smoke=("replicated, dense", "ZeRO-2, 4 and 8 bits", "ZeRO-3, 4 back, 8 forth"),
    ),
    # Many steps of a small model, a fifth of whose labels is drawn anew in each step.
    "endurance": Study(
        "endurance",
        "endurance",
        rows_of_endurance(),
        tables.endurance,
        tasks=("noisy digits",),
        steps=20_000,
        seeds=1,
        workers=4,
        column=Endures,
        smoke=("top-k 5 %", "two stages, top-k 5 %", "diloco, 10 local steps"),
        few=20,
    ),
}
