"""How gradients are exchanged: the methods that are compared, and the optimizer behind each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import optax
import optax.contrib
from tasks import WORKERS

import fftgrad as fg
from fftgrad.contrib import learned, votes

AXIS = "data"
Transformation = Any
"""Of optax, with extra arguments."""
Branch = tuple[int, ...]


class Setting(NamedTuple):
    """What a method is told of its run."""

    workers: int = WORKERS
    steps: int = 200


Exchange = fg.Recipe | Transformation | Callable[[Setting], fg.Recipe | Transformation]
Around = Callable[[Setting, Transformation], Transformation]


@dataclasses.dataclass(frozen=True)
class Method:
    """What replaces the dense mean, and what the optimizer behind it needs for that."""

    name: str
    # in front of the optimizer; a function of the setting where it depends on that
    exchange: Exchange = None
    around: Around | None = None  # in place of an exchange, a whole optimizer made of another one
    momentum: bool = True  # whether the optimizer keeps its momentum. Feedback is one already
    corrects: bool = False  # whether the memory has the momentum that the optimizer lacks
    directs: float | None = None  # of a method whose updates only need a rate, that rate
    # one of ours that takes the exchange itself, in place of the task's Adam
    optimizer: Callable[..., Transformation] | None = None
    muon: bool = False  # whether the optimizer is Muon, with Adam for what is no matrix
    every: int = 1  # steps to an exchange
    own: bool = False  # whether the workers have parameters of their own in between
    # shares of the steps in which other branches of the program run at first, and these
    phases: tuple[tuple[float, Branch], ...] = ()
    later: Branch = ()  # the branch that runs after them
    once: Branch | None = None  # one that runs once before that
    pace: float = 1.0  # the learning rate over slow links, in units of the task's
    # by what its messages travel, where the exchange does not show it
    by: type[fg.exchanges.Exchange] = fg.AllReduce

    @property
    def for_adam(self) -> bool:
        """Whether it takes the place of Adam, and of nothing else."""
        return self.muon or self.optimizer is not None

    def inner(self, adam: bool, rate: Any) -> Transformation:
        """The optimizer without the exchange; the rate is a number, an array or a schedule."""
        descend = optax.scale_by_learning_rate(rate)
        if self.directs is not None:
            return descend
        if self.optimizer is not None:
            return functools.partial(self.optimizer, rate)
        if self.muon:  # with updates as long as Adam's, whose rates then fit
            return optax.contrib.muon(rate, consistent_rms=0.2, adam_b2=0.99)
        if adam:
            return optax.chain(
                optax.scale_by_adam(b1=0.9 if self.momentum else 0, b2=0.99), descend
            )
        # Momentum 0.9 makes ten times of a gradient, unless the memory does.
        factor = 1.0 if self.corrects else 10.0
        return optax.chain(optax.trace(0.9) if self.momentum else optax.scale(factor), descend)

    def made(self, setting: Setting) -> Any:
        """The exchange, as it is for a setting."""
        return self.exchange(setting) if callable(self.exchange) else self.exchange

    def on_link(self, run: Mapping[str, Any], workers: int, ran: int = WORKERS) -> float:
        """How many times fewer bytes cross a worker's link than in a ring all-reduce of float32.

        A run's ratios are of the bytes that each of the `ran` workers handed over. A ring sends
        those of a sum twice, and a gathered message w - 1 times; of the w + 1 messages of two
        stages, two stay where they are. Headers are taken to be nothing beside a message. NaN where
        other workers hand over another number of bytes, as in a sum of small integers.
        """
        found = getattr(self.made(Setting()), "exchange", None)
        stages = found.exchanges if isinstance(found, fg.Scheduled) else (found,)
        last = stages[-1].exchange if isinstance(stages[-1], fg.Eigenbasis) else stages[-1]
        if isinstance(last, fg.exchanges.QuantizedAllReduce) and workers != ran:
            return float("nan")
        by = self.by if found is None else type(last)
        apart = (ran + 1) / ran if by is fg.TwoStage else 2 / workers if by is fg.AllGather else 1
        if self.phases and (isinstance(stages[0], fg.AllReduce) or by is fg.TwoStage):
            dense, _ = self.phases[0]
            return float(1 / (dense + (1 / run["mean_ratio"] - dense) / apart))
        return float(apart * run["mean_ratio"])

    def mean(self, setting: Setting) -> Transformation:
        """The exchange as a transformation."""
        what = self.made(setting)
        return fg.compressed_pmean(what, axis_name=AXIS) if isinstance(what, fg.Recipe) else what

    def assemble(self, setting: Setting, inner: Transformation) -> Transformation:
        """The whole optimizer."""
        if self.around is not None:
            return self.around(setting, inner)
        if self.optimizer is not None:
            return inner(self.made(setting), axis_name=AXIS)
        return optax.chain(self.mean(setting), inner)


def times(ratio: float) -> str:
    """A ratio in two figures, or more before its point."""
    if ratio != ratio:
        return ""
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.2g}"


# Kinds of rows


def fed_back(name: str, exchange: Exchange, **options: Any) -> Method:
    """With feedback, and so with an optimizer that has no momentum."""
    return Method(name, exchange, momentum=False, **options)


def plain(method: Method) -> Method:
    """Feedback is a momentum: the same without the optimizer's."""
    return dataclasses.replace(method, name=f"{method.name}, no momentum", momentum=False)


def ours(name: str, *stages: fg.codecs.Codec, memory: fg.memories.Memory | None = None) -> Method:
    """The same feedback for all, another codec each."""
    return fed_back(name, fg.Recipe(fg.AllGather(fg.chain(*stages)), memory or DECAYED))


def by_owners(name: str, *stages: fg.codecs.Codec) -> Method:
    """The same by owners of shards, in two stages."""
    codec = fg.chain(*stages)
    return fed_back(name, lambda own: fg.Recipe(fg.TwoStage(codec, own.workers), DECAYED))


def starting(
    name: str,
    first: fg.exchanges.Exchange,
    *stages: fg.codecs.Codec,
    scope: Literal["leaf"] | None = None,
) -> Method:
    """Another exchange in the first tenth of the steps; all feedback is kept."""

    def make(setting: Setting) -> fg.Recipe:
        later = fg.AllGather(fg.chain(*stages))
        schedule = fg.Scheduled({0: first, max(1, setting.steps // 10): later})
        return fg.Recipe(schedule, FEEDBACK, fg.Bucketing(scope))

    return fed_back(name, make, phases=((0.1, (0,)),), later=(1,))


def by_ratio(name: str, transform: fg.codecs.Codec, ratio: float) -> Method:
    """As many bytes in all, of which a quarter go into the first tenth of the steps."""
    first = fg.AllGather(fg.chain(transform, fg.Budget(ratio=0.4 * ratio)))
    return starting(name, first, transform, fg.Budget(ratio=1.2 * ratio))


def learned_codes(name: str, variant: Literal["leader", "all_reduce"]) -> Method:
    """Dense for a tenth of the steps, learning for three, and codes; all leaves alike."""

    def make(own: Setting) -> fg.Recipe:
        dense, learning = max(1, own.steps // 10), max(1, 3 * own.steps // 10)
        return learned.lgc(dense_steps=dense, learning_steps=learning, variant=variant, rate=0.1)

    phases = ((0.1, (0,)), (0.3, (1, 1)))
    return fed_back(name, make, phases=phases, later=(1, 0), once=(1, 0, 0))


def diloco(
    name: str,
    every: int,
    recipe: Callable[[Setting], fg.Recipe],
    fragments: int = 1,
    muon: bool = False,
    **options: Any,
) -> Method:
    """Local steps, then a mean of what they changed, with plain descent outside."""

    def around(setting: Setting, inner: Transformation) -> Transformation:
        return fg.optimizers.diloco(
            inner,
            optax.sgd(1.0),
            every,
            recipe(setting),
            fragments=fragments,
            axis_name=AXIS,
            **options,
        )

    by = type(recipe(Setting()).exchange)
    return Method(name, around=around, every=every // fragments, own=True, by=by, muon=muon)


def local(name: str, every: int, **options: Any) -> Method:
    """Local steps that send signs in two stages."""
    return diloco(
        name, every, lambda own: fg.Recipe(fg.TwoStage(SIGN, own.workers), DECAYED), **options
    )


def local_filled(name: str, every: int, ratio: float, muon: bool = False) -> Method:
    """Local steps that send a filled message behind feedback."""
    recipe = fg.Recipe(fg.AllGather(fg.Budget(ratio=ratio)), FEEDBACK)
    return diloco(name, every, lambda _: recipe, muon=muon)


def two_stages(
    name: str, ratio: float, optimizer: Callable[..., Transformation], turned: bool = False
) -> Method:
    """Shards to their owners and back, both ways filled with the largest, behind feedback."""

    def exchange(own: Setting) -> fg.Recipe:
        found = fg.TwoStage(fg.Budget(ratio=ratio), own.workers)
        return fg.Recipe(fg.Eigenbasis(found) if turned else found, FEEDBACK)

    return Method(name, exchange, optimizer=optimizer)


def filled(name: str, ratio: float, **options: Any) -> Method:
    """A message filled with the largest values, behind feedback."""
    return Method(name, fg.Recipe(fg.AllGather(fg.Budget(ratio=ratio)), FEEDBACK), **options)


def adam(lead: float) -> Callable[..., Transformation]:
    """`feedback_adam` with that share of the gradient."""
    return functools.partial(fg.optimizers.feedback_adam, lead=lead)


def muon(lead: float) -> Callable[..., Transformation]:
    """`feedback_muon` with so much of the normalized gradient."""
    return functools.partial(fg.optimizers.feedback_muon, lead=lead)


def led(name: str, exchange: fg.exchanges.Exchange, lead: float = 0.5) -> Method:
    """Behind feedback, before Muon with a lead."""
    return Method(name, fg.Recipe(exchange, FEEDBACK), optimizer=muon(lead))


def sparse_loco(name: str, every: int, outer_rate: float) -> Method:
    """As run at 72 billion parameters, but for how often and how far."""

    def around(_: Setting, inner: Transformation) -> Transformation:
        return fg.optimizers.sparse_loco(
            inner, sync_every=every, outer_rate=outer_rate, axis_name=AXIS
        )

    return Method(name, around=around, every=every, own=True, by=fg.AllGather)


def demo(k: int) -> Transformation:
    """The signs of DeMo's mean."""
    return optax.chain(fg.compressed_pmean(m.demo(k), axis_name=AXIS), optax.scale_by_sign())


# Rows: a name, an exchange, and the ratios that are published and counted

m = fg.methods
DECAYED, FEEDBACK = fg.ErrorFeedback(decay=0.95), fg.ErrorFeedback()
FOUR, SIGN, DCT, FFT = fg.LogQuantizer(4), fg.Sign(), fg.Dct(block=64), fg.Fft(block=64)
LARGE, PERCENT, MILLE = fg.TopK(0.04), fg.TopK(0.01), fg.TopK(0.001)
TRIMMED: Any = {"dense_below": 1024, "trimmed_below": 32768}
OUTPUT = ("params/Dense_0",)
LATE: Any = {"overlap_steps": 1, "mixing": 0.5}

SIGN_SGD = Method("signSGD + EF", m.sign_sgd())
SCALECOM = Method("ScaleCom 50x", m.scalecom(50))
POWER_SGD_1 = Method("PowerSGD rank 1", m.power_sgd(rank=1))
POWER_SGD = Method("PowerSGD rank 4", m.power_sgd(rank=4))
ACP_SGD = Method("ACP-SGD rank 4", m.acp_sgd(rank=4))

METHODS: list[Method] = [
    Method("dense", fg.Recipe(fg.AllReduce())),
    Method("bfloat16", fg.Recipe(fg.AllGather(fg.Cast("bfloat16")))),
    # The FFT paper's own comparison, at its settings.
    Method("FFT (paper)", m.fft_sparsification()),
    Method("top-k 15 % (paper)", m.top_k(0.15, memory=fg.NoMemory())),
    Method("QSGD 3 bits (paper)", m.qsgd(bits=3)),
    Method("TernGrad no clip (paper)", m.terngrad(clip=None, dense=OUTPUT)),
    # Methods as published.
    Method("QSGD 4 bits", m.qsgd(bits=4)),
    Method("TernGrad", m.terngrad()),
    Method("TernGrad, shared scale", lambda own: m.terngrad(workers=own.workers)),
    Method("EDEN 1 bit (DRIVE)", m.eden(bits=1)),
    Method("EDEN 2 bits", m.eden(bits=2)),
    Method("majority vote", m.scale_by_majority_vote(), directs=1e-3, by=fg.AllGather),
    # Votes alone, with a noise that protects nobody, and with one of epsilon 8 on "lm" (delta
    # 1e-5, 200 steps). The seed is no secret.
    *(
        Method(
            f"DataLens 1 %{noise}",
            votes.scale_by_datalens(votes.TopVotes(WORKERS, fraction=0.01, sigma=sigma), key=0),
            directs=1e-3,
            by=fg.AllGather,
        )
        for noise, sigma in (("", 0.0), (", noise 1", 1.0), (", noise 664", 664.0))
    ),
    SIGN_SGD,
    Method(
        "1-bit Adam",
        lambda own: m.scale_by_one_bit_adam(max(1, own.steps // 5), own.workers, b2=0.99),
        directs=8e-3,
        phases=((0.2, (1,)),),
        later=(0,),
        by=fg.TwoStage,
    ),
    fed_back("top-k 1 % + EF", m.top_k(0.01)),
    fed_back("random-k 10 % + EF", m.random_k(0.1)),
    fed_back("DGC 1 %", m.dgc(0.01), corrects=True),
    fed_back("RedSync 1 %", m.redsync(0.01, **TRIMMED), corrects=True),
    fed_back(
        "RedSync 1 %, quantized",
        m.redsync(0.01, quantize=True, output=OUTPUT, **TRIMMED),
        corrects=True,
    ),
    SCALECOM,
    Method("AdaComp", m.adacomp(conv_bin=50, bin_size=500)),
    POWER_SGD_1,
    POWER_SGD,
    ACP_SGD,
    Method("Dion rank 16", m.scale_by_dion(rank=16, dense=("Embed", *OUTPUT)), directs=8e-3),
    *map(plain, (SIGN_SGD, SCALECOM, POWER_SGD_1, POWER_SGD, ACP_SGD)),
    Method("DeMo k = 32", demo(32), directs=1e-3, by=fg.AllGather),
    Method("DeMo k = 8", demo(8), directs=1e-3, by=fg.AllGather),
    # Ours.
    ours("top-k 4 %, 4 bits", LARGE, FOUR),
    ours("DCT 64, 4 %, 4 bits", DCT, LARGE, FOUR),
    ours("FFT 64, 4 %, 4 bits", FFT, LARGE, FOUR),
    ours("top-k 1 %, sign", PERCENT, SIGN),
    by_owners("two stages, top-k 4 %, 4 bits", LARGE, FOUR),
    fed_back("shared top-k 4 %", fg.Recipe(fg.exchanges.LeaderTopK(LARGE), DECAYED)),
    # The paper's floats, whose few levels hang from the largest magnitude alone.
    ours("top-k 4 %, 4-bit range float", LARGE, fg.RangeFloat(4)),
    ours("FFT 64, 4 %, 4-bit range float", FFT, LARGE, fg.RangeFloat(4)),
    ours("top-k 1 %, 3 bits", PERCENT, fg.LogQuantizer(3)),
    fed_back("top-k 0.1 %, 4 bits + EF", m.top_k(0.001, bits=4)),
    # A message filled with as many of the largest as fit; with all that is not sent kept, because
    # a fine message has little to forget; and with a quarter of the bytes in the first tenth.
    *(ours(f"budget {ratio}x", fg.Budget(ratio=ratio)) for ratio in (100, 300, 1000)),
    *(ours(f"DCT 64, budget {ratio}x", DCT, fg.Budget(ratio=ratio)) for ratio in (100, 300)),
    ours("budget 100x, no decay", fg.Budget(ratio=100), memory=FEEDBACK),
    *(
        ours(f"DCT 64, budget {ratio}x, no decay", DCT, fg.Budget(ratio=ratio), memory=FEEDBACK)
        for ratio in (100, 300)
    ),
    *(by_ratio(f"DCT 64, budget {ratio}x, dense start", DCT, ratio) for ratio in (100, 300, 1000)),
    by_ratio("budget 300x, dense start", fg.codecs.Identity(), 300),
    # An autoencoder's codes of 0.1 % of each leaf, and the same values in others.
    learned_codes("LGC leader, 0.1 %", "leader"),
    learned_codes("LGC all-reduce, 0.1 %", "all_reduce"),
    starting("top-k 0.1 %, dense start", fg.AllReduce(), MILLE, scope="leaf"),
    starting("top-k 0.1 %, 4 bits, dense start", fg.AllReduce(), MILLE, FOUR, scope="leaf"),
    ours("DCT 64, 1 %, sign", DCT, PERCENT, SIGN),
    # Each worker trains on its own in between.
    local("8 local steps, sign", 8),
    local("8 local steps in 8 fragments, sign", 8, fragments=8, **LATE),
    local("4 local steps in 4 fragments, sign", 4, fragments=4, **LATE),
    local("8 local steps of Muon, sign", 8, muon=True),
    sparse_loco("SparseLoCo, 8 local steps, outer 1.0", 8, 1.0),
    sparse_loco("SparseLoCo, 8 local steps, outer 0.4", 8, 0.4),
]
"""Of the tables of training, by their names there."""
ROWS = {method.name: method for method in METHODS}


def renamed(name: str, row: str, **changes: Any) -> Method:
    """A row of the tables of training, under another name."""
    return dataclasses.replace(ROWS[row], name=name, **changes)


DENSE = ("dense, Adam", "dense, Muon")
ENDS: list[Method] = [
    renamed("dense, Adam", "dense"),
    renamed("dense, Muon", "dense", muon=True),
    filled("100x, Muon, lead 0.5", 100, optimizer=muon(0.5)),
    filled("30x, Muon, lead 0.3", 30, optimizer=muon(0.3)),
    filled("300x, Muon, lead 0.5", 300, optimizer=muon(0.5)),
    renamed("dense, Muon, lead 0.3", "dense", optimizer=muon(0.3)),
    *(
        two_stages(f"two stages {ratio}x, Muon, lead {lead}", ratio, muon(lead))
        for ratio, lead in ((12, 0.3), (25, 0.3), (50, 0.3), (100, 0.3))
    ),
    *(
        two_stages(f"eigenbasis {ratio}x, Muon, lead 0.3", ratio, muon(0.3), turned=True)
        for ratio in (25, 50, 100)
    ),
    two_stages("two stages 25x, Adam, lead 0.3", 25, adam(0.3)),
    renamed("EDEN 1 bit, Muon, lead 0.3", "EDEN 1 bit (DRIVE)", optimizer=muon(0.3)),
    renamed("PowerSGD rank 4, Muon, lead 0.3", "PowerSGD rank 4", optimizer=muon(0.3)),
    renamed("PowerSGD rank 4, Adam, lead 0.3", "PowerSGD rank 4", optimizer=adam(0.3)),
    local_filled("4 local steps of Muon, 25x", 4, 25, muon=True),
    local_filled("4 local steps of Adam, 25x", 4, 25),
    diloco(
        "4 local steps of Muon, two stages 12x",
        4,
        lambda own: fg.Recipe(fg.TwoStage(fg.Budget(ratio=12.5), own.workers), FEEDBACK),
        muon=True,
    ),
]
"""Of the loss at the end of training, on held-out tasks."""
SHARED: list[Method] = [
    Method("ScaleCom 65x, Muon, lead 0.5", m.scalecom(65), optimizer=muon(0.5)),
    led("ScaleCom 400x, one vector, Muon, lead 0.5", fg.exchanges.LeaderTopK(fg.ChunkTopK(400))),
]
"""One worker chooses for all, and nothing is forgotten."""
FOUNDING: list[Method] = [
    renamed("FFT (paper), Adam", "FFT (paper)"),
    renamed("top-k 15 % (paper), Adam", "top-k 15 % (paper)"),
    renamed("QSGD 3 bits (paper), Adam", "QSGD 3 bits (paper)"),
    Method("TernGrad no clip, Adam", m.terngrad(clip=None)),
    led("FFT 64, 30x, Muon, lead 0.3", fg.AllGather(fg.chain(FFT, fg.Budget(ratio=30))), 0.3),
    Method("QSGD 3 bits, Muon", m.qsgd(bits=3), muon=True),
    Method("TernGrad no clip, Muon", m.terngrad(clip=None), muon=True),
    dataclasses.replace(
        ours("FFT 16, 0.1 %, 4 bits, Muon, lead 0.5", fg.Fft(block=16), MILLE, FOUR),
        optimizer=muon(0.5),
    ),
    Method("RedSync 0.1 %, Adam", m.redsync(0.001, **TRIMMED), momentum=False, corrects=True),
    led("RedSync's search 0.1 %, Muon, lead 0.5", fg.AllGather(fg.Threshold(0.001))),
    *SHARED,
]
"""The codecs of the founding papers before Adam, as published, and before Muon, with 8 workers."""
BY_NAME = {row.name: row for row in (*METHODS, *ENDS, *FOUNDING)}
SECONDS: list[Method] = [
    *(BY_NAME[name] for name in DENSE),
    BY_NAME["100x, Muon, lead 0.5"],
    BY_NAME["EDEN 1 bit, Muon, lead 0.3"],
    POWER_SGD,
    BY_NAME["PowerSGD rank 4, Adam, lead 0.3"],
    BY_NAME["PowerSGD rank 4, Muon, lead 0.3"],
    BY_NAME["two stages 25x, Muon, lead 0.3"],
    BY_NAME["eigenbasis 25x, Muon, lead 0.3"],
]
"""Of the large task, whose steps are timed over links too."""


BF16, LLOYD = fg.Cast("bfloat16"), fg.codecs.LloydMax(bits=2, block=256)
SWITCHED = fg.Scheduled(
    {at: fg.AllGather(fg.chain(DCT, fg.Budget(ratio=r))) for at, r in ((0, 120), (6, 360))}
)
NARROW = Method("bfloat16, two stages", lambda own: fg.Recipe(fg.TwoStage(BF16, own.workers)))
LINKS: dict[str, Method] = {
    "dense": renamed("dense float32", "dense"),
    "bf16": NARROW,
    "fft-64": ROWS["FFT 64, 4 %, 4 bits"],
    "budget": fed_back("DCT 64, budget 120, later 360", fg.Recipe(SWITCHED, FEEDBACK)),
    "top-k": ours("top-k 1 %, 4 bits", PERCENT, FOUR),
    "sign": by_owners("sign, two stages", SIGN),
    "lloyd-max": Method(
        "Lloyd-Max 2 bits, two stages",
        lambda own: fg.Recipe(fg.TwoStage(LLOYD, own.workers), fg.ErrorFeedback(decay=0.9)),
    ),
    **{f"local-{n}": local(f"{n} local steps, sign", n) for n in (4, 6, 8, 16)},
    "stream-4-fast": renamed(
        "4 local steps in 4 fragments, twice the rate",
        "4 local steps in 4 fragments, sign",
        pace=2.0,
    ),
    "sparse-loco-8": renamed("SparseLoCo, 8 local steps", "SparseLoCo, 8 local steps, outer 1.0"),
    "stream-4": renamed("4 local steps in 4 fragments", "4 local steps in 4 fragments, sign"),
    "powersgd": POWER_SGD,
    "acp-sgd": ACP_SGD,
    "dion": Method("Dion rank 16", m.scale_by_dion(rank=16), directs=1e-3),
    "dense-muon": renamed("dense float32, Muon", "dense", muon=True),
    "bf16-muon": dataclasses.replace(NARROW, name="bfloat16, Muon", muon=True),
    "muon-local-4": BY_NAME["4 local steps of Muon, 25x"],
    "muon-eden": BY_NAME["EDEN 1 bit, Muon, lead 0.3"],
    "adam-powersgd": BY_NAME["PowerSGD rank 4, Adam, lead 0.3"],
    "muon-powersgd": BY_NAME["PowerSGD rank 4, Muon, lead 0.3"],
    "muon-100x": BY_NAME["100x, Muon, lead 0.5"],
    "muon-two-25x": BY_NAME["two stages 25x, Muon, lead 0.3"],
    "muon-two-25x-share": two_stages(
        "two stages 25x, Muon of shares", 25, functools.partial(muon(0.3), share_axis=AXIS)
    ),
    "muon-turned-25x": BY_NAME["eigenbasis 25x, Muon, lead 0.3"],
}
"""Of the runs over slow links, by the names of their command line."""

PEERS: dict[str, str] = {
    "torch": "PyTorch DDP",
    "torch-powersgd": "PyTorch DDP, PowerSGD rank 4",
}
"""PyTorch's DistributedDataParallel, and a hook that comes with it."""
