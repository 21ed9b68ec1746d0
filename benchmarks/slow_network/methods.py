"""How gradients are exchanged: ours and the field's, by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
import optax.contrib

import fftgrad as fg

AXIS = "data"


Transformation = optax.GradientTransformation
Assembly = Callable[[int, Transformation], Transformation]
"""A whole optimizer from the number of workers and an optimizer without exchange."""


@dataclasses.dataclass(frozen=True)
class Method:
    """An exchange, and the momentum that goes with it.

    Attributes:
      momentum: whether the optimizer keeps its momentum; error feedback is one already.
      corrects: whether the memory has the momentum that the optimizer lacks.
      directs: whether the method makes directions, which nothing but a rate has to follow.
      muon: whether matrices go through Muon, with updates as long as Adam's.
      codec: what encodes the whole gradient, where one codec does; to time it on its own.
      every: steps to an exchange; with more than one, it is in a branch of its own.
      pace: the learning rate, in units of the workload's.
    """

    label: str
    assemble: Assembly
    momentum: bool = True
    corrects: bool = False
    directs: bool = False
    muon: bool = False
    codec: fg.Codec | None = None
    every: int = 1
    pace: float = 1.0

    def tail(self, adam: bool, schedule: optax.Schedule) -> Transformation:
        """The optimizer without the exchange."""

        def rate(count: Any) -> Any:
            return self.pace * schedule(count)

        clip, descend = optax.clip_by_global_norm(1.0), optax.scale_by_learning_rate(rate)
        if self.directs:
            return descend
        if self.muon:
            return optax.chain(clip, optax.contrib.muon(rate, consistent_rms=0.2, adam_b2=0.99))
        if adam:
            moments = optax.scale_by_adam(b1=0.9 if self.momentum else 0, b2=0.99)
            return optax.chain(clip, moments, descend)
        # Momentum 0.9 makes ten times of a gradient, unless the memory does.
        factor = 1.0 if self.corrects else 10.0
        momentum = optax.trace(0.9) if self.momentum else optax.scale(factor)
        return optax.chain(clip, momentum, descend)


def _published(tx: Transformation) -> Assembly:
    return lambda _, tail: optax.chain(tx, tail)


def _pmean(exchange: fg.Exchange, memory: fg.Memory = fg.NoMemory()) -> Assembly:
    return _published(fg.compressed_pmean(exchange, memory, axis_name=AXIS))


def _two_stage(codec: fg.Codec, memory: fg.Memory = fg.NoMemory()) -> Assembly:
    def assemble(workers: int, tail: Transformation) -> Transformation:
        return _pmean(fg.TwoStage(codec, workers), memory)(workers, tail)

    return assemble


def _local(label: str, codec: fg.Codec, every: int, fragments: int = 1, **late: float) -> Method:
    def assemble(workers: int, inner: Transformation) -> Transformation:
        exchange, memory = fg.TwoStage(codec, workers), fg.ErrorFeedback(decay=0.95)
        streamed: Any = {"fragments": fragments, **late}
        outer = optax.sgd(1.0)
        return fg.optimizers.diloco(
            inner, outer, every, exchange, memory, axis_name=AXIS, **streamed
        )

    return Method(label, assemble, codec=codec, every=every // fragments)


def _sparse_loco(label: str, every: int, outer_rate: float) -> Method:
    def assemble(_: int, inner: Transformation) -> Transformation:
        return fg.optimizers.sparse_loco(inner, every=every, outer_rate=outer_rate, axis_name=AXIS)

    return Method(label, assemble, every=every)


def _budget(label: str, first: float, later: float, change: int) -> Method:
    first_codec, codec = (fg.chain(fg.Dct(block=64), fg.Budget(ratio=r)) for r in (first, later))
    exchange = fg.Scheduled({0: fg.AllGather(first_codec), change: fg.AllGather(codec)})
    return Method(label, _pmean(exchange, fg.ErrorFeedback()), momentum=False, codec=codec)


def _feedback(label: str, codec: fg.Codec, *, stages: int = 1) -> Method:
    memory = fg.ErrorFeedback(decay=0.95)
    exchange = _pmean(fg.AllGather(codec), memory) if stages == 1 else _two_stage(codec, memory)
    return Method(label, exchange, momentum=False, codec=codec)


_FOUR = fg.LogLevels(bits=4)
_PERCENT, _MILLE = fg.TopK(fraction=0.01), fg.TopK(fraction=0.001)
_SIGN, _BF16, _RANDOM = fg.Sign(), fg.Cast("bfloat16"), fg.RandomK(fraction=0.01)
_LLOYD = fg.codecs.LloydMax(bits=2, block=256)

METHODS: dict[str, Method] = {
    "dense": Method("dense float32", _pmean(fg.AllReduce())),
    "bf16": Method("bfloat16, two stages", _two_stage(_BF16), codec=_BF16),
    "fft-paper": Method(
        "FFT whole (paper)",
        _published(fg.compressed_pmean(fg.methods.fft_sparsification(), axis_name=AXIS)),
    ),
    "fft-64": _feedback(
        "FFT 64, 4 %, 4 bits", fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.04), _FOUR)
    ),
    "fft-16": _feedback("FFT 16, 0.1 %, 4 bits", fg.chain(fg.Fft(block=16), _MILLE, _FOUR)),
    "dct-64": _feedback(
        "DCT 64, 4 %, 4 bits", fg.chain(fg.Dct(block=64), fg.TopK(fraction=0.04), _FOUR)
    ),
    "budget": _budget("DCT 64, budget 120, later 360", 120, 360, 6),
    "top-k": _feedback("top-k 1 %, 4 bits", fg.chain(_PERCENT, _FOUR)),
    "top-k-mille": _feedback("top-k 0.1 %, 4 bits", fg.chain(_MILLE, _FOUR)),
    "two-stage": _feedback("top-k 1 %, two stages", fg.chain(_PERCENT, _FOUR), stages=2),
    "sign": Method(
        "sign, two stages",
        _two_stage(_SIGN, fg.ErrorFeedback(decay=0.95)),
        momentum=False,
        codec=_SIGN,
    ),
    "lloyd-max": Method(
        "Lloyd-Max 2 bits, two stages",
        _two_stage(_LLOYD, fg.ErrorFeedback(decay=0.9)),
        codec=_LLOYD,
    ),
    "local-4": _local("4 local steps, sign", _SIGN, 4),
    "local-6": _local("6 local steps, sign", _SIGN, 6),
    "local-8": _local("8 local steps, sign", _SIGN, 8),
    "local-16": _local("16 local steps, sign", _SIGN, 16),
    "local-32": _local("32 local steps, sign", _SIGN, 32),
    "stream-4-fast": dataclasses.replace(
        _local("4 local steps in 4 fragments, twice the rate", _SIGN, 4, 4, delay=1, blend=0.5),
        pace=2.0,
    ),
    "local-8-fast": dataclasses.replace(
        _local("8 local steps, sign, twice the rate", _SIGN, 8), pace=2.0
    ),
    "dense-fast": Method("dense float32, twice the rate", _pmean(fg.AllReduce()), pace=2.0),
    "muloco-8": dataclasses.replace(_local("8 local steps of Muon, sign", _SIGN, 8), muon=True),
    "sparse-loco-8": _sparse_loco("SparseLoCo, 8 local steps", 8, 1.0),
    "stream-4": _local("4 local steps in 4 fragments", _SIGN, 4, 4, delay=1, blend=0.5),
    "stream-8": _local("8 local steps in 8 fragments", _SIGN, 8, 8, delay=1, blend=0.5),
    "random-k": Method(
        "random-k 1 %",
        _pmean(fg.AllReduce(_RANDOM), fg.ErrorFeedback(decay=0.95)),
        momentum=False,
    ),
    "redsync": Method(
        "RedSync 0.1 %",
        _published(fg.compressed_pmean(fg.methods.redsync(), axis_name=AXIS)),
        momentum=False,
        corrects=True,
    ),
    "scalecom": Method(
        "ScaleCom 50x",
        _published(fg.compressed_pmean(fg.methods.scalecom(50), axis_name=AXIS)),
        momentum=False,
    ),
    "qsgd": Method(
        "QSGD 4 bits", _published(fg.compressed_pmean(fg.methods.qsgd(bits=4), axis_name=AXIS))
    ),
    "terngrad": Method(
        "TernGrad", _published(fg.compressed_pmean(fg.methods.terngrad(), axis_name=AXIS))
    ),
    "powersgd": Method(
        "PowerSGD rank 4",
        _published(fg.compressed_pmean(fg.methods.power_sgd(rank=4), axis_name=AXIS)),
    ),
    "powersgd-b0": Method(
        "PowerSGD rank 4, no momentum",
        _published(fg.compressed_pmean(fg.methods.power_sgd(rank=4), axis_name=AXIS)),
        momentum=False,
    ),
    "acp-sgd": Method(
        "ACP-SGD rank 4",
        _published(fg.compressed_pmean(fg.methods.acp_sgd(rank=4), axis_name=AXIS)),
    ),
    "dion": Method("Dion rank 16", _published(fg.methods.scale_by_dion(rank=16)), directs=True),
}

PEERS: dict[str, str] = {
    "torch": "PyTorch DDP",
    "torch-fp16": "PyTorch DDP, fp16 hook",
    "torch-powersgd": "PyTorch DDP, PowerSGD rank 4",
}
"""PyTorch's DistributedDataParallel, and two of the hooks that come with it."""
