"""How gradients are exchanged: the methods that are compared, and the optimizer behind each."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
import optax.contrib
from tasks import WORKERS, Task

import fftgrad as fg
from fftgrad.contrib import learned

AXIS = "data"
Transformation = optax.GradientTransformationExtraArgs


@dataclasses.dataclass(frozen=True)
class Method:
    """What replaces the dense mean, and what the optimizer behind it needs for that.

    Attributes:
      make: the transformation, given the number of steps of the run.
      momentum: whether the optimizer keeps its momentum. Feedback is one already.
      signs: whether the updates are signs: plain descent at a small rate then.
      corrects: whether the memory has the momentum that the optimizer lacks.
      warm_up: share of the steps that run at first.
      branches: which branches of the program run at first, and later.
      learns: share of the steps after those in which another branch runs, `learning`; and the
        branch that runs once after them.
      learning: that branch, and this one.
      around: of local steps, the whole optimizer around an inner one.
      every: steps to an exchange.
      muon: whether the inner optimizer is Muon, with Adam for what is no matrix.
      published: the ratio as papers count it, without indices and scales.
      counted: with indices of 32 bits, and scales, as most implementations send them.
    """

    name: str
    make: Callable[[int], Transformation] | None = None
    momentum: bool = True
    signs: bool = False
    adam: bool = False
    corrects: bool = False
    warm_up: float = 0.0
    branches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    learns: float = 0.0
    learning: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    around: Callable[[optax.GradientTransformation], Transformation] | None = None
    every: int = 1
    muon: bool = False
    published: float | None = None
    counted: float | None = None


def demo(k: int) -> Transformation:
    """The mean of DeMo, and the signs of it."""
    return optax.chain(
        fg.compressed_pmean(fg.methods.demo(k), axis_name=AXIS), optax.scale_by_sign()
    )


def fixed(method: Transformation | fg.Recipe) -> Callable[[int], Transformation]:
    """The same transformation, whatever the number of steps."""
    is_recipe = isinstance(method, fg.Recipe)
    tx = fg.compressed_pmean(method, axis_name=AXIS) if is_recipe else method

    def make(steps: int) -> Transformation:
        del steps
        return tx

    return make


def pmean(
    codec: fg.Codec | fg.Exchange, memory: fg.Memory = fg.NoMemory()
) -> Callable[[int], Transformation]:
    """The compressed mean, whatever the number of steps."""
    exchange = codec if isinstance(codec, fg.Exchange) else fg.AllGather(codec)
    return fixed(fg.compressed_pmean(exchange, memory, axis_name=AXIS))


def dense_start(transform: fg.Codec, ratio: float) -> Callable[[int], Transformation]:
    """Messages that are larger in the first tenth of the steps; `ratio` over the whole run."""

    def make(steps: int) -> Transformation:
        first, later = (fg.chain(transform, fg.Budget(ratio=r)) for r in (0.4 * ratio, 1.2 * ratio))
        schedule = {0: fg.AllGather(first), max(1, steps // 10): fg.AllGather(later)}
        return pmean(fg.Scheduled(schedule), fg.ErrorFeedback())(steps)

    return make


def local(every: int, exchange: fg.Exchange, fragments: int = 1, **late: float) -> dict[str, Any]:
    """Local steps, with the memory of the other rows of ours and plain descent outside."""
    outer, memory = optax.sgd(1.0), fg.ErrorFeedback(decay=0.95)
    options: Any = {"fragments": fragments, **late}

    def around(inner: optax.GradientTransformation) -> Transformation:
        return fg.optimizers.diloco(
            inner, outer, every, exchange, memory, axis_name=AXIS, **options
        )

    return {"around": around, "every": every // fragments}


def sparse_loco(every: int, outer_rate: float) -> dict[str, Any]:
    """As run at 72 billion parameters, but for how often and how far."""

    def around(inner: optax.GradientTransformation) -> Transformation:
        return fg.optimizers.sparse_loco(inner, every=every, outer_rate=outer_rate, axis_name=AXIS)

    return {"around": around, "every": every}


def learned_codes(variant: Literal["leader", "all_reduce"]) -> dict[str, Any]:
    """Dense for a tenth of the steps, learning for three, and codes; all leaves alike."""

    def make(steps: int) -> Transformation:
        dense, learning = max(1, steps // 10), max(1, 3 * steps // 10)
        return fg.compressed_pmean(
            learned.lgc(dense_steps=dense, learning_steps=learning, variant=variant, rate=0.1),
            axis_name=AXIS,
        )

    branches, learning = ((0,), (1, 0)), ((1, 1), (1, 0, 0))
    phases = {"warm_up": 0.1, "branches": branches, "learns": 0.3, "learning": learning}
    return {"make": make, "momentum": False, **phases}


def after_dense(*stages: fg.Codec) -> dict[str, Any]:
    """The same with 0.1 % of each leaf in another code, from the dense start on."""

    def make(steps: int) -> Transformation:
        schedule = {0: fg.AllReduce(), max(1, steps // 10): fg.AllGather(fg.chain(*stages))}
        leaves = fg.Layout("leaf")
        exchange = fg.Scheduled(schedule)
        return fg.compressed_pmean(exchange, fg.ErrorFeedback(), axis_name=AXIS, layout=leaves)

    return {"make": make, "momentum": False, "warm_up": 0.1, "branches": ((0,), (1,))}


def methods() -> list[Method]:
    """All the rows."""
    m, decayed, four = fg.methods, fg.ErrorFeedback(decay=0.95), fg.LogLevels(4)
    dct, fft = fg.Dct(block=64), fg.Fft(block=64)
    signs = fg.TwoStage(fg.Sign(), WORKERS)

    return [
        Method("dense", pmean(fg.AllReduce()), published=1, counted=1),
        Method("bfloat16", pmean(fg.Cast("bfloat16")), published=2, counted=2),
        # The FFT paper's own comparison, at its settings.
        Method("FFT (paper)", fixed(m.fft_sparsification()), published=21.3, counted=16),
        Method(
            "top-k 15 % (paper)",
            fixed(m.top_k(0.15, memory=fg.NoMemory())),
            published=6.67,
            counted=3.33,
        ),
        Method("QSGD 3 bits (paper)", fixed(m.qsgd(bits=3)), published=10.6, counted=10.4),
        Method(
            "TernGrad no clip (paper)",
            fixed(m.terngrad(clip=None, dense=("params/Dense_0",))),
            published=16,
            counted=16,
        ),
        # Methods as published.
        Method("QSGD 4 bits", fixed(m.qsgd(bits=4)), published=8, counted=7.9),
        Method("TernGrad", fixed(m.terngrad()), published=16, counted=16),
        Method(
            "TernGrad, shared scale", fixed(m.terngrad(workers=WORKERS)), published=16, counted=6.4
        ),
        Method("EDEN 1 bit (DRIVE)", fixed(m.eden(bits=1)), published=32, counted=31.8),
        Method("EDEN 2 bits", fixed(m.eden(bits=2)), published=16, counted=15.9),
        Method(
            "majority vote", fixed(m.scale_by_majority_vote()), signs=True, published=32, counted=32
        ),
        # Votes alone, with a noise that protects nobody, and with one of epsilon 8 on "lm" (delta
        # 1e-5, 200 steps). The seed is no secret.
        *(
            Method(
                f"DataLens 1 %{noise}",
                fixed(
                    fg.contrib.votes.scale_by_datalens(
                        fg.contrib.votes.TopVotes(WORKERS, fraction=0.01, sigma=sigma), key=0
                    )
                ),
                signs=True,
            )
            for noise, sigma in (("", 0.0), (", noise 1", 1.0), (", noise 664", 664.0))
        ),
        Method("signSGD + EF", fixed(m.sign_sgd()), published=32, counted=32),
        Method(
            "1-bit Adam",
            lambda steps: m.scale_by_one_bit_adam(max(1, steps // 5), WORKERS, b2=0.99),
            adam=True,
            warm_up=0.2,
            branches=((1,), (0,)),
            published=32,
            counted=16,
        ),
        Method("top-k 1 % + EF", fixed(m.top_k(0.01)), momentum=False, published=100, counted=50),
        Method(
            "random-k 10 % + EF", fixed(m.random_k(0.1)), momentum=False, published=10, counted=10
        ),
        Method("DGC 1 %", fixed(m.dgc(0.01)), False, corrects=True, published=100, counted=50),
        Method(
            "RedSync 1 %",
            fixed(m.redsync(0.01, dense_below=1024, trimmed_below=32768)),
            momentum=False,
            corrects=True,
            published=100,
            counted=50,
        ),
        Method(
            "RedSync 1 %, quantized",
            fixed(
                m.redsync(
                    0.01,
                    quantize=True,
                    output=("params/Dense_0",),
                    dense_below=1024,
                    trimmed_below=32768,
                )
            ),
            momentum=False,
            corrects=True,
            published=200,
            counted=100,
        ),
        Method("ScaleCom 50x", fixed(m.scalecom(50)), published=50, counted=25),
        Method(
            "ScaleCom 50x, FFT 64",
            fixed(m.scalecom(50, transform=fg.Fft(block=64), exact=True)),
            published=50,
            counted=25,
        ),
        Method("AdaComp", fixed(m.adacomp(conv_bin=50, bin_size=500)), published=100),
        Method("PowerSGD rank 1", fixed(m.power_sgd(rank=1))),
        Method("PowerSGD rank 4", fixed(m.power_sgd(rank=4))),
        Method("ACP-SGD rank 4", fixed(m.acp_sgd(rank=4))),
        Method(
            "Dion rank 16",
            fixed(m.scale_by_dion(rank=16, dense=("Embed", "params/Dense_0"))),
            adam=True,
        ),
        # Feedback is a momentum: the same without the optimizer's.
        Method("signSGD + EF, no momentum", fixed(m.sign_sgd()), False, published=32, counted=32),
        Method("ScaleCom 50x, no momentum", fixed(m.scalecom(50)), False, published=50, counted=25),
        Method("PowerSGD rank 1, no momentum", fixed(m.power_sgd(rank=1)), False),
        Method("PowerSGD rank 4, no momentum", fixed(m.power_sgd(rank=4)), False),
        Method("ACP-SGD rank 4, no momentum", fixed(m.acp_sgd(rank=4)), False),
        Method("DeMo k = 32", fixed(demo(32)), signs=True),
        Method("DeMo k = 8", fixed(demo(8)), signs=True),
        # Ours: the same feedback for all, another codec each.
        Method("top-k 4 %, 4 bits", pmean(fg.chain(fg.TopK(0.04), four), decayed), False),
        Method("DCT 64, 4 %, 4 bits", pmean(fg.chain(dct, fg.TopK(0.04), four), decayed), False),
        Method("FFT 64, 4 %, 4 bits", pmean(fg.chain(fft, fg.TopK(0.04), four), decayed), False),
        Method("top-k 1 %, sign", pmean(fg.chain(fg.TopK(0.01), fg.Sign()), decayed), False),
        Method(
            "two stages, top-k 4 %, 4 bits",
            pmean(fg.TwoStage(fg.chain(fg.TopK(0.04), four), WORKERS), decayed),
            momentum=False,
        ),
        Method("shared top-k 4 %", pmean(fg.SharedSupport(fg.TopK(0.04)), decayed), False),
        Method(
            "shared by the mean 4 %",
            pmean(
                fg.SharedSupport(fg.TopK(0.04), support=fg.exchanges.PredictedSupport()), decayed
            ),
            momentum=False,
        ),
        # The paper's floats, whose few levels hang from the largest magnitude alone.
        Method(
            "top-k 4 %, 4-bit range float",
            pmean(fg.chain(fg.TopK(0.04), fg.RangeFloat(4)), decayed),
            momentum=False,
        ),
        Method(
            "FFT 64, 4 %, 4-bit range float",
            pmean(fg.chain(fft, fg.TopK(0.04), fg.RangeFloat(4)), decayed),
            momentum=False,
        ),
        Method(
            "top-k 1 %, 3 bits",
            pmean(fg.chain(fg.TopK(0.01), fg.LogLevels(3)), decayed),
            momentum=False,
        ),
        Method("top-k 0.1 %, 4 bits + EF", fixed(m.top_k(0.001, bits=4)), momentum=False),
        # A message filled with as many of the largest as fit.
        Method("budget 100x", pmean(fg.Budget(ratio=100), decayed), momentum=False),
        Method("budget 300x", pmean(fg.Budget(ratio=300), decayed), momentum=False),
        Method("budget 1000x", pmean(fg.Budget(ratio=1000), decayed), momentum=False),
        Method(
            "DCT 64, budget 100x",
            pmean(fg.chain(dct, fg.Budget(ratio=100)), decayed),
            momentum=False,
        ),
        Method(
            "DCT 64, budget 300x",
            pmean(fg.chain(dct, fg.Budget(ratio=300)), decayed),
            momentum=False,
        ),
        # With all that is not sent kept: a fine message has little to forget.
        Method(
            "budget 100x, no decay",
            pmean(fg.Budget(ratio=100), fg.ErrorFeedback()),
            momentum=False,
        ),
        *(
            Method(
                f"DCT 64, budget {ratio}x, no decay",
                pmean(fg.chain(dct, fg.Budget(ratio=ratio)), fg.ErrorFeedback()),
                momentum=False,
            )
            for ratio in (100, 300)
        ),
        # The same bytes in all, of which a quarter go into the first tenth of the steps.
        *(
            Method(
                f"DCT 64, budget {ratio}x, dense start",
                dense_start(dct, ratio),
                momentum=False,
                warm_up=0.1,
                branches=((0,), (1,)),
            )
            for ratio in (100, 300, 1000)
        ),
        Method(
            "budget 300x, dense start",
            dense_start(fg.Identity(), 300),
            momentum=False,
            warm_up=0.1,
            branches=((0,), (1,)),
        ),
        # An autoencoder's codes of 0.1 % of each leaf, and the same values in others.
        Method("LGC leader, 0.1 %", **learned_codes("leader")),
        Method("LGC all-reduce, 0.1 %", **learned_codes("all_reduce")),
        Method("top-k 0.1 %, dense start", **after_dense(fg.TopK(0.001))),
        Method("top-k 0.1 %, 4 bits, dense start", **after_dense(fg.TopK(0.001), four)),
        Method("DCT 64, 1 %, sign", pmean(fg.chain(dct, fg.TopK(0.01), fg.Sign()), decayed), False),
        # Each worker trains on its own in between.
        Method("8 local steps, sign", **local(8, signs)),
        Method("8 local steps in 8 fragments, sign", **local(8, signs, 8, delay=1, blend=0.5)),
        Method("4 local steps in 4 fragments, sign", **local(4, signs, 4, delay=1, blend=0.5)),
        Method("8 local steps of Muon, sign", **local(8, signs), muon=True),
        Method("SparseLoCo, 8 local steps, outer 1.0", **sparse_loco(8, 1.0)),
        Method("SparseLoCo, 8 local steps, outer 0.4", **sparse_loco(8, 0.4)),
    ]


def local_optimizer(task: Task, method: Method, rate: jax.Array | float) -> Transformation:
    """The whole optimizer of a method with local steps."""
    assert method.around is not None
    if method.muon:  # with updates as long as Adam's, whose rates then fit
        return method.around(optax.contrib.muon(rate, consistent_rms=0.2, adam_b2=0.99))
    inner = optax.scale_by_adam(b2=0.99) if task.adam else optax.trace(0.9)
    return method.around(optax.chain(inner, optax.scale(-rate)))


def optimizer(task: Task, method: Method, steps: int) -> Transformation:
    """The method and what follows it, up to the learning rate."""
    assert method.make is not None
    exchange = method.make(steps)
    if method.signs or method.adam:
        tail = optax.identity()
    elif task.adam:
        tail = optax.scale_by_adam(b1=0.9 if method.momentum else 0.0, b2=0.99)
    elif method.momentum:
        tail = optax.trace(0.9)
    else:
        # Momentum 0.9 makes ten times of a gradient, unless the memory does.
        tail = optax.scale(1.0 if method.corrects else 10.0)
    return optax.with_extra_args_support(optax.chain(exchange, tail))


def schedule(task: Task, method: Method, rate: float, steps: int) -> Callable[[int], Any]:
    """That of the task, at a peak that fits the size of the method's steps."""
    # A step of Adam has about the size of its rate, as one of signs has.
    base = 1e-3 if method.signs else 8e-3 if method.adam else task.rate
    return task.schedule(rate * base, steps)
