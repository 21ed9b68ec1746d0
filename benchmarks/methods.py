"""How gradients are exchanged: the methods that are compared, and the optimizer behind each."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
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


Make = Callable[[Setting], Transformation]
Around = Callable[[Setting, Transformation], Transformation]


@dataclasses.dataclass(frozen=True)
class Method:
    """What replaces the dense mean, and what the optimizer behind it needs for that.

    Attributes:
      exchange: the transformation in front of the optimizer.
      around: in place of it, a whole optimizer made of another one.
      momentum: whether the optimizer keeps its momentum. Feedback is one already.
      corrects: whether the memory has the momentum that the optimizer lacks.
      directs: of a method whose updates only need a rate, that rate.
      muon: whether the optimizer is Muon, with Adam for what is no matrix.
      every: steps to an exchange.
      own: whether the workers have parameters of their own in between.
      shards: of parameters that lie sharded over the workers, how they are gathered.
      phases: shares of the steps in which other branches of the program run at first, and these.
      later: the branch that runs after them.
      once: one that runs once before that.
      codec: what encodes the whole gradient, where one codec does; to time it on its own.
      pace: the learning rate over slow links, in units of the task's.
      published: the ratio as papers count it, without indices and scales.
      counted: with indices of 32 bits, and scales, as most implementations send them.
    """

    name: str
    exchange: Make | None = None
    around: Around | None = None
    momentum: bool = True
    corrects: bool = False
    directs: float | None = None
    muon: bool = False
    every: int = 1
    own: bool = False
    shards: Mapping[str, Any] | None = None
    phases: tuple[tuple[float, Branch], ...] = ()
    later: Branch = ()
    once: Branch | None = None
    codec: fg.Codec | None = None
    pace: float = 1.0
    published: float | None = None
    counted: float | None = None

    def inner(self, adam: bool, rate: Any) -> Transformation:
        """The optimizer without the exchange; the rate is a number, an array or a schedule."""
        descend = optax.scale_by_learning_rate(rate)
        if self.directs is not None:
            return descend
        if self.muon:  # with updates as long as Adam's, whose rates then fit
            return optax.contrib.muon(rate, consistent_rms=0.2, adam_b2=0.99)
        if adam:
            return optax.chain(
                optax.scale_by_adam(b1=0.9 if self.momentum else 0, b2=0.99), descend
            )
        # Momentum 0.9 makes ten times of a gradient, unless the memory does.
        factor = 1.0 if self.corrects else 10.0
        return optax.chain(optax.trace(0.9) if self.momentum else optax.scale(factor), descend)

    def assemble(self, setting: Setting, inner: Transformation) -> Transformation:
        """The whole optimizer."""
        if self.around is not None:
            return self.around(setting, inner)
        assert self.exchange is not None
        return optax.chain(self.exchange(setting), inner)


# Exchanges


def fixed(tx: Transformation) -> Make:
    """The same transformation in all settings."""
    return lambda _: tx


def mean(
    exchange: fg.Codec | fg.Exchange, memory: fg.Memory = fg.NoMemory(), **options: Any
) -> Make:
    """The compressed mean; a codec gathers."""
    gathered = exchange if isinstance(exchange, fg.Exchange) else fg.AllGather(exchange)
    return fixed(fg.compressed_pmean(gathered, memory, axis_name=AXIS, **options))


def two_stages(codec: fg.Codec, memory: fg.Memory = fg.NoMemory()) -> Make:
    """The compressed mean by owners of shards."""
    return lambda setting: mean(fg.TwoStage(codec, setting.workers), memory)(setting)


def in_turn(first: fg.Codec | fg.Exchange, later: fg.Codec, layout: fg.Layout) -> Make:
    """One exchange in the first tenth of the steps, then another; all feedback is kept."""
    start = first if isinstance(first, fg.Exchange) else fg.AllGather(first)

    def make(setting: Setting) -> Transformation:
        schedule = {0: start, max(1, setting.steps // 10): fg.AllGather(later)}
        return mean(fg.Scheduled(schedule), fg.ErrorFeedback(), layout=layout)(setting)

    return make


def sparse_loco(every: int, outer_rate: float) -> dict[str, Any]:
    """As run at 72 billion parameters, but for how often and how far."""

    def around(_: Setting, inner: Transformation) -> Transformation:
        return fg.optimizers.sparse_loco(inner, every=every, outer_rate=outer_rate, axis_name=AXIS)

    return {"around": around, "every": every, "own": True}


def learned_codes(variant: Literal["leader", "all_reduce"]) -> dict[str, Any]:
    """Dense for a tenth of the steps, learning for three, and codes; all leaves alike."""

    def make(setting: Setting) -> Transformation:
        dense, learning = max(1, setting.steps // 10), max(1, 3 * setting.steps // 10)
        return learned.lgc(
            dense_steps=dense, learning_steps=learning, variant=variant, rate=0.1, axis_name=AXIS
        )

    phases = ((0.1, (0,)), (0.3, (1, 1)))
    return {"exchange": make, "phases": phases, "later": (1, 0), "once": (1, 0, 0)}


# What a run looks at


class Seen(NamedTuple):
    """Each worker's gradient of the last step."""

    gradients: fg.exchanges.PerWorker


def onlooker(keep: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Changes nothing; its state is what is kept of the updates."""

    def init(params: Any) -> Any:
        return keep(optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return updates, keep(updates)

    return optax.GradientTransformation(init, update)


def watched(method: Method) -> Method:
    """The same method, with the workers' gradients in its state."""

    def keep(gradient: Any) -> Seen:
        return Seen(fg.exchanges.PerWorker(jax.tree.map(lambda g: g[None], gradient)))

    def around(setting: Setting, inner: Transformation) -> Transformation:
        return optax.chain(onlooker(keep), method.assemble(setting, inner))

    return dataclasses.replace(method, around=around)


def gradients_of(state: Any) -> Any:
    """The rows that `watched` has kept."""
    return optax.tree.get(state, "gradients").value


# Rows


def ours(name: str, codec: fg.Codec, stages: int = 1) -> Method:
    """The same feedback for all, another codec each."""
    exchange = mean(codec, DECAYED) if stages == 1 else two_stages(codec, DECAYED)
    return Method(name, exchange, momentum=False, codec=codec)


def local(name: str, every: int, **options: Any) -> Method:
    """Local steps, then signs of what they changed, with plain descent outside."""

    def around(setting: Setting, inner: Transformation) -> Transformation:
        outer, exchange = optax.sgd(1.0), fg.TwoStage(SIGN, setting.workers)
        return fg.optimizers.diloco(
            inner, outer, every, exchange, DECAYED, axis_name=AXIS, **options
        )

    often = every // options.get("fragments", 1)
    return Method(name, around=around, every=often, own=True, codec=SIGN)


def kept(name: str, exchange: fg.Codec | fg.Exchange, memory: fg.Memory) -> Method:
    """With another memory, or another exchange."""
    return Method(name, mean(exchange, memory), momentum=False)


def starting(name: str, exchange: Make) -> Method:
    """With larger messages in the first tenth of the steps."""
    return Method(name, exchange, momentum=False, phases=((0.1, (0,)),), later=(1,))


def by_ratio(name: str, transform: fg.Codec, ratio: float) -> Method:
    """As many bytes in all, of which a quarter go into the first tenth of the steps."""
    first, later = (fg.chain(transform, fg.Budget(ratio=r)) for r in (0.4 * ratio, 1.2 * ratio))
    return starting(name, in_turn(first, later, fg.Layout()))


def after_dense(name: str, *stages: fg.Codec) -> Method:
    """0.1 % of each leaf, after a dense start."""
    return starting(name, in_turn(fg.AllReduce(), fg.chain(*stages), fg.Layout("leaf")))


def fed_back(name: str, tx: Transformation, **options: Any) -> Method:
    """A published method with feedback, and an optimizer without momentum."""
    return Method(name, fixed(tx), momentum=False, **options)


def plain(method: Method) -> Method:
    """Feedback is a momentum: the same without the optimizer's."""
    return dataclasses.replace(method, name=f"{method.name}, no momentum", momentum=False)


m = fg.methods
DECAYED, FEEDBACK, NONE = fg.ErrorFeedback(decay=0.95), fg.ErrorFeedback(), fg.NoMemory()
FOUR, SIGN, DCT, FFT = fg.LogLevels(4), fg.Sign(), fg.Dct(block=64), fg.Fft(block=64)
LARGE, PERCENT, MILLE = fg.TopK(0.04), fg.TopK(0.01), fg.TopK(0.001)
TRIMMED: Any = {"dense_below": 1024, "trimmed_below": 32768}
OUTPUT = ("params/Dense_0",)
LATE: Any = {"delay": 1, "blend": 0.5}

SIGN_SGD = Method("signSGD + EF", fixed(m.sign_sgd()), published=32, counted=32)
SCALECOM = Method("ScaleCom 50x", fixed(m.scalecom(50)), published=50, counted=25)
POWER_SGD_1 = Method("PowerSGD rank 1", fixed(m.power_sgd(rank=1)))
POWER_SGD = Method("PowerSGD rank 4", fixed(m.power_sgd(rank=4)))
ACP_SGD = Method("ACP-SGD rank 4", fixed(m.acp_sgd(rank=4)))

METHODS: list[Method] = [
    Method("dense", mean(fg.AllReduce()), published=1, counted=1),
    Method("bfloat16", mean(fg.Cast("bfloat16")), published=2, counted=2),
    # The FFT paper's own comparison, at its settings.
    Method("FFT (paper)", fixed(m.fft_sparsification()), published=21.3, counted=16),
    Method("top-k 15 % (paper)", fixed(m.top_k(0.15, memory=NONE)), published=6.67, counted=3.33),
    Method("QSGD 3 bits (paper)", fixed(m.qsgd(bits=3)), published=10.6, counted=10.4),
    Method(
        "TernGrad no clip (paper)",
        fixed(m.terngrad(clip=None, dense=OUTPUT)),
        published=16,
        counted=16,
    ),
    # Methods as published.
    Method("QSGD 4 bits", fixed(m.qsgd(bits=4)), published=8, counted=7.9),
    Method("TernGrad", fixed(m.terngrad()), published=16, counted=16),
    Method(
        "TernGrad, shared scale",
        lambda setting: m.terngrad(workers=setting.workers),
        published=16,
        counted=6.4,
    ),
    Method("EDEN 1 bit (DRIVE)", fixed(m.eden(bits=1)), published=32, counted=31.8),
    Method("EDEN 2 bits", fixed(m.eden(bits=2)), published=16, counted=15.9),
    Method("majority vote", fixed(m.majority_vote()), directs=1e-3, published=32, counted=32),
    # Votes alone, with a noise that protects nobody, and with one of epsilon 8 on "lm" (delta
    # 1e-5, 200 steps). The seed is no secret.
    *(
        Method(
            f"DataLens 1 %{noise}",
            fixed(votes.datalens(votes.TopVotes(WORKERS, fraction=0.01, sigma=sigma), key=0)),
            directs=1e-3,
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
        published=32,
        counted=16,
    ),
    fed_back("top-k 1 % + EF", m.top_k(0.01), published=100, counted=50),
    fed_back("random-k 10 % + EF", m.random_k(0.1), published=10, counted=10),
    fed_back("DGC 1 %", m.dgc(0.01), corrects=True, published=100, counted=50),
    fed_back("RedSync 1 %", m.redsync(0.01, **TRIMMED), corrects=True, published=100, counted=50),
    fed_back(
        "RedSync 1 %, quantized",
        m.redsync(0.01, quantize=True, output=OUTPUT, **TRIMMED),
        corrects=True,
        published=200,
        counted=100,
    ),
    SCALECOM,
    Method(
        "ScaleCom 50x, FFT 64",
        fixed(m.scalecom(50, transform=FFT, exact=True)),
        published=50,
        counted=25,
    ),
    Method("AdaComp", fixed(m.adacomp(conv_bin=50, bin_size=500)), published=100),
    POWER_SGD_1,
    POWER_SGD,
    ACP_SGD,
    Method("Dion rank 16", fixed(m.dion(rank=16, dense=("Embed", *OUTPUT))), directs=8e-3),
    *map(plain, (SIGN_SGD, SCALECOM, POWER_SGD_1, POWER_SGD, ACP_SGD)),
    Method("DeMo k = 32", fixed(m.demo(k=32)), directs=1e-3),
    Method("DeMo k = 8", fixed(m.demo(k=8)), directs=1e-3),
    # Ours.
    ours("top-k 4 %, 4 bits", fg.chain(LARGE, FOUR)),
    ours("DCT 64, 4 %, 4 bits", fg.chain(DCT, LARGE, FOUR)),
    ours("FFT 64, 4 %, 4 bits", fg.chain(FFT, LARGE, FOUR)),
    ours("top-k 1 %, sign", fg.chain(PERCENT, SIGN)),
    ours("two stages, top-k 4 %, 4 bits", fg.chain(LARGE, FOUR), stages=2),
    kept("shared top-k 4 %", fg.SharedSupport(LARGE), DECAYED),
    kept(
        "shared by the mean 4 %",
        fg.SharedSupport(LARGE, support=fg.exchanges.PredictedSupport()),
        DECAYED,
    ),
    # The paper's floats, whose few levels hang from the largest magnitude alone.
    ours("top-k 4 %, 4-bit range float", fg.chain(LARGE, fg.RangeFloat(4))),
    ours("FFT 64, 4 %, 4-bit range float", fg.chain(FFT, LARGE, fg.RangeFloat(4))),
    ours("top-k 1 %, 3 bits", fg.chain(PERCENT, fg.LogLevels(3))),
    fed_back("top-k 0.1 %, 4 bits + EF", m.top_k(0.001, bits=4)),
    # A message filled with as many of the largest as fit.
    *(ours(f"budget {ratio}x", fg.Budget(ratio=ratio)) for ratio in (100, 300, 1000)),
    *(
        ours(f"DCT 64, budget {ratio}x", fg.chain(DCT, fg.Budget(ratio=ratio)))
        for ratio in (100, 300)
    ),
    # With all that is not sent kept: a fine message has little to forget.
    kept("budget 100x, no decay", fg.Budget(ratio=100), FEEDBACK),
    *(
        kept(f"DCT 64, budget {ratio}x, no decay", fg.chain(DCT, fg.Budget(ratio=ratio)), FEEDBACK)
        for ratio in (100, 300)
    ),
    *(by_ratio(f"DCT 64, budget {ratio}x, dense start", DCT, ratio) for ratio in (100, 300, 1000)),
    by_ratio("budget 300x, dense start", fg.Identity(), 300),
    # An autoencoder's codes of 0.1 % of each leaf, and the same values in others.
    Method("LGC leader, 0.1 %", momentum=False, **learned_codes("leader")),
    Method("LGC all-reduce, 0.1 %", momentum=False, **learned_codes("all_reduce")),
    after_dense("top-k 0.1 %, dense start", MILLE),
    after_dense("top-k 0.1 %, 4 bits, dense start", MILLE, FOUR),
    ours("DCT 64, 1 %, sign", fg.chain(DCT, PERCENT, SIGN)),
    # Each worker trains on its own in between.
    local("8 local steps, sign", 8),
    local("8 local steps in 8 fragments, sign", 8, fragments=8, **LATE),
    local("4 local steps in 4 fragments, sign", 4, fragments=4, **LATE),
    dataclasses.replace(local("8 local steps of Muon, sign", 8), muon=True),
    Method("SparseLoCo, 8 local steps, outer 1.0", **sparse_loco(8, 1.0)),
    Method("SparseLoCo, 8 local steps, outer 0.4", **sparse_loco(8, 0.4)),
]
"""Of the tables of training, by their names there."""
ROWS = {method.name: method for method in METHODS}

_BF16, _LLOYD, _RANDOM = (
    fg.Cast("bfloat16"),
    fg.codecs.LloydMax(bits=2, block=256),
    fg.RandomK(0.01),
)
_SWITCHED = fg.Scheduled(
    {at: fg.AllGather(fg.chain(DCT, fg.Budget(ratio=r))) for at, r in ((0, 120), (6, 360))}
)


def renamed(name: str, row: str, **changes: Any) -> Method:
    """A row of the tables of training, under another name."""
    return dataclasses.replace(ROWS[row], name=name, **changes)


LINKS: dict[str, Method] = {
    "dense": renamed("dense float32", "dense"),
    "bf16": Method("bfloat16, two stages", two_stages(_BF16), codec=_BF16),
    "fft-paper": renamed("FFT whole (paper)", "FFT (paper)"),
    "fft-64": ROWS["FFT 64, 4 %, 4 bits"],
    "fft-16": ours("FFT 16, 0.1 %, 4 bits", fg.chain(fg.Fft(block=16), MILLE, FOUR)),
    "budget": kept("DCT 64, budget 120, later 360", _SWITCHED, FEEDBACK),
    "top-k": ours("top-k 1 %, 4 bits", fg.chain(PERCENT, FOUR)),
    "top-k-mille": ours("top-k 0.1 %, 4 bits", fg.chain(MILLE, FOUR)),
    "two-stage": ours("top-k 1 %, two stages", fg.chain(PERCENT, FOUR), stages=2),
    "sign": ours("sign, two stages", SIGN, stages=2),
    "lloyd-max": Method(
        "Lloyd-Max 2 bits, two stages",
        two_stages(_LLOYD, fg.ErrorFeedback(decay=0.9)),
        codec=_LLOYD,
    ),
    **{f"local-{n}": local(f"{n} local steps, sign", n) for n in (4, 6, 8, 16)},
    "stream-4-fast": renamed(
        "4 local steps in 4 fragments, twice the rate",
        "4 local steps in 4 fragments, sign",
        pace=2.0,
    ),
    "sparse-loco-8": renamed("SparseLoCo, 8 local steps", "SparseLoCo, 8 local steps, outer 1.0"),
    "stream-4": renamed("4 local steps in 4 fragments", "4 local steps in 4 fragments, sign"),
    "random-k": kept("random-k 1 %", fg.AllReduce(_RANDOM), DECAYED),
    "redsync": fed_back("RedSync 0.1 %", m.redsync(), corrects=True),
    "scalecom": renamed("ScaleCom 50x", "ScaleCom 50x", momentum=False),
    "qsgd": ROWS["QSGD 4 bits"],
    "terngrad": ROWS["TernGrad"],
    "powersgd": POWER_SGD,
    "powersgd-b0": plain(POWER_SGD),
    "acp-sgd": ACP_SGD,
    "dion": Method("Dion rank 16", fixed(m.dion(rank=16)), directs=1e-3),
}
"""Of the runs over slow links, by the names of their command line."""

PEERS: dict[str, str] = {
    "torch": "PyTorch DDP",
    "torch-fp16": "PyTorch DDP, fp16 hook",
    "torch-powersgd": "PyTorch DDP, PowerSGD rank 4",
}
"""PyTorch's DistributedDataParallel, and two of the hooks that come with it."""
