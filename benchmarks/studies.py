"""The studies of `convergence.py`: what is trained with which methods.

A study is an entry of `STUDIES`: rows, tasks, steps, seeds, learning rates, and the table of its
results. `columns.py` has what it asks of a run beside the loss and the bytes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import optax
import tables
from columns import CHUNK, DGC, EVERY, Bytes, Curve, Endures, Overlap, errors
from jax.sharding import Mesh
from matplotlib.figure import Figure
from methods import (
    AXIS,
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
    onlooker,
    plain,
    renamed,
    watched,
)
from program import Column, Reset
from tables import LOCAL, MILLE, TOP_K, VARIANTS, often
from tasks import WORKERS, Schedule, Task, constant

import fftgrad as fg

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
RATES = {TOP_K: (0.5,), MILLE: (2.0,), "signSGD + EF, no momentum": (1.0,), LOCAL: (2.0,)}
"""The best of 0.5, 1 and 2, without resets."""


def resets_of(method: Method, steps: int) -> tuple[Reset, ...]:
    """All of them, for rows that are no variant; of the residual alone, those that are resets."""
    each = [min(every, steps // 2) for every in often(steps)]
    if method.name == "diloco, residual only":
        return tuple(Reset(every, "residual") for every in each[1:])
    return tuple(Reset(every) for every in each[: 1 if method.name in VARIANTS else None])


FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformQuantizer(4, bucket=256, norm="max"))
EIGHT = fg.UniformQuantizer(8, bucket=256, norm="max")


def of_state(name: str, gradients: fg.codecs.Codec, parameters: fg.codecs.Codec) -> Method:
    """Shards of the optimizer's state; what encodes gradients, and parameters on their way back."""

    def around(setting: Setting, inner: Transformation) -> Transformation:
        codecs: Any = {"gradients": gradients, "parameters": parameters}
        return fg.optimizers.sharded(inner, setting.workers, axis_name=AXIS, **codecs)

    return Method(name, around=around)


def of_parameters(name: str, parameters: fg.codecs.Codec | None) -> Method:
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
    name: str,
    exchange: fg.exchanges.Exchange | fg.codecs.Codec,
    scope: Literal["leaf"] | None = None,
    **kept: Any,
) -> Method:
    """A method with feedback that forgets nothing."""
    exchange = fg.AllGather(exchange) if isinstance(exchange, fg.codecs.Codec) else exchange
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
        feedback("shared top-k 5 %", fg.exchanges.LeaderTopK(top_k)),
        feedback("integer sum, 7 levels", fg.exchanges.QuantizedAllReduce(workers, levels=7)),
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
    # The FFT paper: a theta that goes to zero where the learning rate falls trains as dense does.
    # ScaleCom: the residuals of the workers are alike, so what one finds large is large for all.
    "claims": Study(
        "papers",
        "training",
        list(rows_of_claims()),
        tables.claims,
        tasks=("digits", "lm"),
        schedule=cut,
        column=Overlap,
        smoke=("dense", "theta 0.5", "theta 0.9, then 0", "ScaleCom, beta 1.0"),
    ),
    # What it costs to lose what each worker has of its own, and to keep it in bfloat16.
    "resets": Study(
        "resets",
        "resets",
        list(rows_of_resets()),
        tables.resets,
        steps=400,
        known=RATES | {name: RATES[plain] for name, plain in VARIANTS.items()},
        resets=resets_of,
        smoke=(TOP_K, LOCAL, f"{TOP_K}, bfloat16"),
    ),
    # Adam replicated, with its state sharded (ZeRO-2), and with the parameters sharded (ZeRO-3).
    "sharded": Study(
        "sharded",
        "lm",
        [
            renamed("replicated, dense", "dense"),
            of_state("ZeRO-2, nothing lost", fg.codecs.Identity(), fg.codecs.Identity()),
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
