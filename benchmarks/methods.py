"""Rows: how gradients are exchanged, and the optimizer behind each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax
import optax.contrib
from tasks import WORKERS

import fftgrad as fg

AXIS = "data"
Transformation = Any
"""Of optax, with extra arguments."""


@dataclasses.dataclass(frozen=True)
class Method:
    """What replaces the dense mean, and the optimizer behind it: Adam, if nothing else is said."""

    name: str
    # a function of the number of workers where it depends on that
    recipe: fg.Recipe | Callable[[int], fg.Recipe]
    momentum: bool = True  # whether Adam keeps its momentum. Feedback is one already
    muon: bool = False  # Muon in place of Adam, with Adam for what is no matrix
    every: int = 1  # local steps to an exchange, with a mean of what they changed
    # one of ours, which takes the exchange itself
    optimizer: Callable[..., Transformation] | None = None

    def made(self, workers: int) -> fg.Recipe:
        """The exchange, as it is for so many workers."""
        return self.recipe if isinstance(self.recipe, fg.Recipe) else self.recipe(workers)

    def assemble(self, workers: int, rate: Any) -> Transformation:
        """The whole optimizer; the rate is a number, an array or a schedule."""
        recipe = self.made(workers)
        if self.optimizer is not None:
            return self.optimizer(rate, recipe, axis_name=AXIS)
        if self.muon:  # with updates as long as Adam's, whose rates then fit
            inner = optax.contrib.muon(rate, consistent_rms=0.2, adam_b2=0.99)
        else:
            adam = optax.scale_by_adam(b1=0.9 if self.momentum else 0, b2=0.99)
            inner = optax.chain(adam, optax.scale_by_learning_rate(rate))
        if self.every > 1:
            outer = optax.sgd(1.0)
            return fg.optimizers.diloco(inner, outer, self.every, recipe, axis_name=AXIS)
        return optax.chain(fg.compressed_pmean(recipe, axis_name=AXIS), inner)

    def on_link(self, run: Mapping[str, Any], workers: int, ran: int = WORKERS) -> float:
        """How many times fewer bytes cross a worker's link than in a ring all-reduce of float32.

        A run's ratio is of the bytes that each of the `ran` workers handed over. A ring sends
        those of a sum twice, and a gathered message w - 1 times; of the w + 1 messages of two
        stages, two stay where they are. Headers are taken to be nothing beside a message.
        """
        exchange = self.made(ran).exchange
        by = type(exchange.exchange if isinstance(exchange, fg.Eigenbasis) else exchange)
        apart = (ran + 1) / ran if by is fg.TwoStage else 2 / workers if by is fg.AllGather else 1
        return float(apart * run["mean_ratio"])


# Kinds of rows


def muon(lead: float, **options: Any) -> Callable[..., Transformation]:
    """`feedback_muon` with so much of the normalized gradient."""
    return functools.partial(fg.optimizers.feedback_muon, lead=lead, **options)


def adam(lead: float) -> Callable[..., Transformation]:
    """`feedback_adam` with that share of the gradient."""
    return functools.partial(fg.optimizers.feedback_adam, lead=lead)


def led(name: str, exchange: fg.exchanges.Exchange, lead: float = 0.5) -> Method:
    """Behind feedback, before Muon with a lead."""
    return Method(name, fg.Recipe(exchange, FEEDBACK), optimizer=muon(lead))


def filled(ratio: float) -> fg.AllGather:
    """A gather of messages that are filled with the largest values."""
    return fg.AllGather(fg.Budget(ratio=ratio))


def two_stages(ratio: float, turned: bool = False) -> Callable[[int], fg.Recipe]:
    """Shards to their owners and back, both ways filled with the largest, behind feedback."""

    def recipe(workers: int) -> fg.Recipe:
        found = fg.TwoStage(fg.Budget(ratio=ratio), workers)
        return fg.Recipe(fg.Eigenbasis(found) if turned else found, FEEDBACK)

    return recipe


def signs(workers: int) -> fg.Recipe:
    """Signs by owners of shards."""
    return fg.Recipe(fg.TwoStage(fg.Sign(), workers), DECAYED)


# Rows

m = fg.methods
DECAYED, FEEDBACK = fg.ErrorFeedback(decay=0.95), fg.ErrorFeedback()
FOUR, FFT = fg.LogQuantizer(4), fg.Fft(block=64)
TRIMMED: Any = {"dense_below": 1024, "trimmed_below": 32768}
DENSE_MEAN = fg.Recipe(fg.AllReduce())
METHODS: list[Method] = [
    Method("dense", DENSE_MEAN),
    # The FFT paper's own comparison, at its settings.
    Method("FFT (paper)", m.fft_sparsification()),
    Method("top-k 15 % (paper)", m.top_k(0.15, memory=fg.NoMemory())),
    Method("QSGD 3 bits (paper)", m.qsgd(bits=3)),
    # Methods as published.
    Method("QSGD 4 bits", m.qsgd(bits=4)),
    Method("TernGrad", m.terngrad()),
    Method("EDEN 1 bit (DRIVE)", m.eden(bits=1)),
    Method("EDEN 2 bits", m.eden(bits=2)),
    Method("signSGD + EF, no momentum", m.sign_sgd(), momentum=False),
    Method("top-k 1 % + EF", m.top_k(0.01), momentum=False),
    Method("random-k 10 % + EF", m.random_k(0.1), momentum=False),
    Method("DGC 1 %", m.dgc(0.01), momentum=False),
    Method("RedSync 1 %", m.redsync(0.01, **TRIMMED), momentum=False),
    Method("ScaleCom 50x, no momentum", m.scalecom(50), momentum=False),
    Method("AdaComp", m.adacomp(conv_bin=50, bin_size=500)),
    Method("PowerSGD rank 4", m.power_sgd(rank=4)),
    Method("PowerSGD rank 4, no momentum", m.power_sgd(rank=4), momentum=False),
    Method("ACP-SGD rank 4, no momentum", m.acp_sgd(rank=4), momentum=False),
    # Ours.
    Method(
        "FFT 64, 4 %, 4 bits",
        fg.Recipe(fg.AllGather(fg.chain(FFT, fg.TopK(0.04), FOUR)), DECAYED),
        momentum=False,
    ),
    Method(
        "DCT 64, budget 100x, no decay",
        fg.Recipe(fg.AllGather(fg.chain(fg.Dct(block=64), fg.Budget(ratio=100))), FEEDBACK),
        momentum=False,
    ),
    Method("8 local steps, sign", signs, every=8),
    Method("8 local steps of Muon, sign", signs, every=8, muon=True),
]
"""On a tuning task, for 200 steps. Commit f576ba0 has the others of `steps-200.json`."""
ADAM, MUON = Method("dense, Adam", DENSE_MEAN), Method("dense, Muon", DENSE_MEAN, muon=True)
ENDS: list[Method] = [
    ADAM,
    MUON,
    led("100x, Muon, lead 0.5", filled(100)),
    led("30x, Muon, lead 0.3", filled(30), 0.3),
    led("300x, Muon, lead 0.5", filled(300)),
    Method("dense, Muon, lead 0.3", DENSE_MEAN, optimizer=muon(0.3)),
    *(
        Method(f"two stages {ratio}x, Muon, lead 0.3", two_stages(ratio), optimizer=muon(0.3))
        for ratio in (12, 25, 50, 100)
    ),
    *(
        Method(f"eigenbasis {ratio}x, Muon, lead 0.3", two_stages(ratio, True), optimizer=muon(0.3))
        for ratio in (25, 50, 100)
    ),
    Method("two stages 25x, Adam, lead 0.3", two_stages(25), optimizer=adam(0.3)),
    Method("EDEN 1 bit, Muon, lead 0.3", m.eden(bits=1), optimizer=muon(0.3)),
    Method("PowerSGD rank 4, Muon, lead 0.3", m.power_sgd(rank=4), optimizer=muon(0.3)),
    Method("PowerSGD rank 4, Adam, lead 0.3", m.power_sgd(rank=4), optimizer=adam(0.3)),
    Method("4 local steps of Muon, 25x", fg.Recipe(filled(25), FEEDBACK), every=4, muon=True),
    Method("4 local steps of Muon, two stages 12x", two_stages(12.5), every=4, muon=True),
]
"""Of the loss at the end of training, on held-out tasks."""
FOUNDING: list[Method] = [
    Method("FFT (paper), Adam", m.fft_sparsification()),
    Method("top-k 15 % (paper), Adam", m.top_k(0.15, memory=fg.NoMemory())),
    Method("QSGD 3 bits (paper), Adam", m.qsgd(bits=3)),
    Method("TernGrad no clip, Adam", m.terngrad(clip=None)),
    led("FFT 64, 30x, Muon, lead 0.3", fg.AllGather(fg.chain(FFT, fg.Budget(ratio=30))), 0.3),
    Method("QSGD 3 bits, Muon", m.qsgd(bits=3), muon=True),
    Method("TernGrad no clip, Muon", m.terngrad(clip=None), muon=True),
    Method(
        "FFT 16, 0.1 %, 4 bits, Muon, lead 0.5",
        fg.Recipe(fg.AllGather(fg.chain(fg.Fft(block=16), fg.TopK(0.001), FOUR)), DECAYED),
        optimizer=muon(0.5),
    ),
    Method("RedSync 0.1 %, Adam", m.redsync(0.001, **TRIMMED), momentum=False),
    led("RedSync's search 0.1 %, Muon, lead 0.5", fg.AllGather(fg.Threshold(0.001))),
    Method("ScaleCom 65x, Muon, lead 0.5", m.scalecom(65), optimizer=muon(0.5)),
    led("ScaleCom 400x, one vector, Muon, lead 0.5", fg.exchanges.LeaderTopK(fg.ChunkTopK(400))),
]
"""The codecs of the founding papers before Adam, as published, and before Muon, with 8 workers."""
BY_NAME = {row.name: row for row in (*METHODS, *ENDS, *FOUNDING)}


def narrow(workers: int) -> fg.Recipe:
    """The dense mean at 2 bytes a value."""
    return fg.Recipe(fg.TwoStage(fg.Cast("bfloat16"), workers))


LINKS: dict[str, Method] = {
    "dense": dataclasses.replace(ADAM, name="dense float32"),
    "bf16": Method("bfloat16, two stages", narrow),
    "dense-muon": dataclasses.replace(MUON, name="dense float32, Muon"),
    "bf16-muon": Method("bfloat16, Muon", narrow, muon=True),
    "powersgd": BY_NAME["PowerSGD rank 4"],
    "adam-powersgd": BY_NAME["PowerSGD rank 4, Adam, lead 0.3"],
    "muon-powersgd": BY_NAME["PowerSGD rank 4, Muon, lead 0.3"],
    "muon-100x": BY_NAME["100x, Muon, lead 0.5"],
    "muon-eden": BY_NAME["EDEN 1 bit, Muon, lead 0.3"],
    "muon-two-25x": BY_NAME["two stages 25x, Muon, lead 0.3"],
    "muon-two-25x-share": Method(
        "two stages 25x, Muon of shares", two_stages(25), optimizer=muon(0.3, share_axis=AXIS)
    ),
    "muon-turned-25x": BY_NAME["eigenbasis 25x, Muon, lead 0.3"],
    "muon-local-4": BY_NAME["4 local steps of Muon, 25x"],
}
"""Of the runs over slow links, by the names of their command line."""

PEERS: dict[str, str] = {
    "torch": "PyTorch DDP",
    "torch-powersgd": "PyTorch DDP, PowerSGD rank 4",
}
"""PyTorch's DistributedDataParallel, and a hook that comes with it."""
