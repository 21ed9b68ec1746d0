"""What else was tried so that compressed training ends where dense does, on a tuning task.

Momentum behind feedback, other memories, other places of the compression, and Muon's own knobs.
What loses here has no place in the library.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _record import markdown
from ends import DENSE, adam, filled, means, muon
from methods import (
    AXIS,
    DCT,
    FEEDBACK,
    POWER_SGD,
    Method,
    Setting,
    Transformation,
    by_ratio,
    renamed,
    times,
)
from program import Study
from training import chosen

import fftgrad as fg

# Memories


class Estimate(fg.ErrorFeedback):
    """EF21 (arXiv:2106.05203): what is sent is how far the gradient is from an estimate of it.

    The estimates of all workers are the sums of what they sent, and so is their mean.
    """

    def compensate(self, grad: Any, state: Any) -> tuple[Any, Any]:
        """The difference."""
        return jax.tree.map(jnp.subtract, grad, state.residual), state

    def update(self, x: Any, sent: Any, mean: Any, state: Any) -> Any:
        """The next estimate."""
        del x, mean
        return state._replace(residual=jax.tree.map(jnp.add, state.residual, sent))


@dataclasses.dataclass(frozen=True)
class Momentum(fg.ErrorFeedback):
    """Each worker's momentum is sent, and loses a share of what was sent, as Dion's does."""

    decay: float = 0.9

    def compensate(self, grad: Any, state: Any) -> tuple[Any, Any]:
        """The momentum; it decays by what is sent of it, and not here."""
        return jax.tree.map(jnp.add, grad, state.residual), state

    def update(self, x: Any, sent: Any, mean: Any, state: Any) -> Any:
        """The momentum that is left."""
        del mean
        rest = jax.tree.map(lambda x, sent: x - (1 - self.decay) * sent, x, sent)
        return state._replace(residual=rest)


# Exchanges


@dataclasses.dataclass(frozen=True)
class Preconditioned(fg.Exchange):
    """Gradients in units of the root of their mean square, which all workers know."""

    codec: fg.Codec
    decay: float = 0.99
    floor: float = 0.01  # of a unit, as a share of that of all

    @property
    def scope(self) -> Any:
        """All values in one vector."""
        return "model"

    def init(self, like: Any) -> fg.exchanges.State:
        """Squares of nothing."""
        inner = fg.AllGather(self.codec).init(like)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape), like)
        return inner._replace(shared=(inner.shared, zeros, jnp.zeros(())))

    def mean(self, x: Any, state: Any, channel: Any) -> fg.Reduced:
        """The mean of the scaled ones, scaled back."""
        shared, squares, weight = state.shared
        known = weight > 0

        def unit(square: jax.Array) -> jax.Array:
            square = square / jnp.where(known, weight, 1.0)
            whole = jnp.sqrt(square.mean())
            one = jnp.sqrt(square) + self.floor * whole
            return jnp.where(known & (whole > 0), one, 1.0)

        units = jax.tree.map(unit, squares)
        scaled = jax.tree.map(jnp.divide, x, units)
        out = fg.AllGather(self.codec).mean(scaled, state._replace(shared=shared), channel)
        mean, sent = (jax.tree.map(jnp.multiply, tree, units) for tree in (out.mean, out.sent))
        d = self.decay
        squares = jax.tree.map(lambda v, g: d * v + (1 - d) * g * g, squares, mean)
        after = out.state._replace(shared=(out.state.shared, squares, d * weight + 1 - d))
        return out._replace(mean=mean, sent=sent, state=after)

    def wire_bytes(self, like: Any) -> int:
        """Those of the codec."""
        return fg.AllGather(self.codec).wire_bytes(like)


# Optimizers


def averaged(inner: Transformation, periods: dict[str, int]) -> Transformation:
    """The optimizer of a worker, with averages that the workers take the mean of now and then.

    DES-LOC (arXiv:2505.22549) has a period for each.
    """

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), inner.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, own = state
        for name, period in periods.items():
            field, now = jax.tree_util.GetAttrKey(name), count % period == 0
            own = jax.tree.map_with_path(
                lambda path, a, field=field, now=now: (
                    jnp.where(now, jax.lax.pmean(a, AXIS), a) if field in path else a
                ),
                own,
            )
        updates, own = inner.update(updates, own, params)
        return updates, (count + 1, own)

    return optax.GradientTransformation(init, update)


def dion2(rate: Any, exchange: Any, axis_name: str, fraction: float = 0.25) -> Transformation:
    """Muon of the largest rows of each matrix (arXiv:2512.16928).

    Of the workers' own momenta, of which no more than those rows travels. A row that was taken
    loses a twentieth of its momentum.
    """
    del exchange  # all else is dense

    def init(params: Any) -> Any:
        return fg.exchanges.PerWorker(jax.tree.map(lambda a: jnp.zeros((1, *a.shape)), params))

    def one(update: jax.Array, momentum: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = update.shape[0] > update.shape[1]
        own = (momentum + update).T if turned else momentum + update
        sizes = jax.lax.pmean(jnp.sum(own * own, axis=1), axis_name)
        taken = jax.lax.top_k(sizes, max(1, round(fraction * len(sizes))))[1]
        mean = jax.lax.pmean(own[taken], axis_name)
        whole = optax.contrib.muon(-1.0, beta=0.0, nesterov=False, consistent_rms=0.2)
        rows = whole.update(mean, whole.init(mean), mean)[0]
        out = jnp.zeros(own.shape).at[taken].set(rows)
        own = own.at[taken].multiply(0.95)
        return (out.T, own.T) if turned else (out, own)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, tree = jax.tree.flatten(updates)
        both = [one(g, m[0]) for g, m in zip(leaves, jax.tree.leaves(state), strict=True)]
        out, own = (jax.tree.unflatten(tree, part) for part in zip(*both, strict=True))
        return out, fg.exchanges.PerWorker(jax.tree.map(lambda a: a[None], own))

    rest = optax.chain(
        fg.compressed_pmean(fg.AllReduce(), masked="elsewhere", axis_name=axis_name),
        optax.scale_by_adam(0.9, 0.99),
    )

    def kinds(params: Any) -> Any:
        return jax.tree.map(lambda a: a.ndim == 2, params)

    both: dict[Any, Any] = {True: optax.GradientTransformation(init, update), False: rest}
    return optax.chain(optax.partition(both, kinds), optax.scale_by_learning_rate(rate))


# Rows

FILLED = fg.Budget(ratio=100)


def late(name: str, **options: Any) -> Method:
    """Dense gradients of the step before."""

    def around(_: Setting, inner: Transformation) -> Transformation:
        mean: Any = fg.compressed_pmean(fg.AllReduce(), axis_name=AXIS)
        return optax.chain(fg.training.delay(), mean, inner)

    return Method(name, around=around, **options)


def late_adam(name: str, nu: float) -> Method:
    """The same before our Adam."""

    def optimizer(rate: Any, exchange: Any, axis_name: str) -> Transformation:
        whole = adam(nu)(rate, exchange, axis_name=axis_name)
        return optax.chain(fg.training.delay(), whole)

    return renamed(name, "dense", optimizer=optimizer)


def ef21(name: str, **options: Any) -> Method:
    """The mean of the estimates is the sum of the means."""

    def exchange(_: Any) -> Transformation:
        recipe = fg.Recipe(fg.AllGather(FILLED), Estimate())
        return optax.chain(fg.compressed_pmean(recipe, axis_name=AXIS), optax.trace(1.0))

    return Method(name, exchange, **options)


def with_memory(name: str, memory: fg.Memory, **options: Any) -> Method:
    """100 times fewer bytes."""
    return Method(name, fg.Recipe(fg.AllGather(FILLED), memory), **options)


def scaled(name: str, **options: Any) -> Method:
    """100 times fewer bytes, of scaled gradients."""
    return Method(name, fg.Recipe(Preconditioned(FILLED), FEEDBACK), **options)


def local(name: str, every: int, exchange: Any, outer: Transformation, **options: Any) -> Method:
    """Local steps, and an outer optimizer for the mean of what they changed."""

    def around(_: Setting, inner: Transformation) -> Transformation:
        return fg.optimizers.diloco(inner, outer, every, exchange, axis_name=AXIS)

    return Method(name, around=around, every=every, own=True, **options)


def desynced(name: str, periods: dict[str, int], every: int, **options: Any) -> Method:
    """4 local steps that are dense; `every` counts the averages that travel too."""

    def around(_: Setting, inner: Transformation) -> Transformation:
        worker = averaged(inner, periods)
        return fg.optimizers.diloco(worker, optax.sgd(1.0), 4, WHOLE, axis_name=AXIS)

    return Method(name, around=around, every=every, own=True, **options)


MUON: Any = {"muon": True}
WHOLE = fg.Recipe(fg.AllReduce())
QUARTER = fg.Recipe(fg.AllGather(fg.Budget(ratio=25)), FEEDBACK)
ONE_BIT = fg.Hadamard(), fg.codecs.LloydMax(bits=1)
MULOCO = fg.Recipe(fg.AllGather(fg.LogLevels(4)), fg.ErrorFeedback(decay=0.9))


def nesterov(rate: float, momentum: float) -> Transformation:
    """An outer optimizer."""
    return optax.sgd(rate, momentum, nesterov=True)


METHODS: list[Method] = [
    renamed("dense, Adam", "dense"),
    renamed("dense, Muon", "dense", muon=True),
    renamed("dense, Adam, nu 0.5", "dense", optimizer=adam(0.5)),
    late("dense, a step late, Adam"),
    late_adam("dense, a step late, Adam, nu 0.5", 0.5),
    late("dense, a step late, Muon", muon=True),
    filled("100x, Adam", 100),
    filled("30x, Adam", 30),
    Method("30x without feedback, Adam", fg.Recipe(fg.AllGather(fg.Budget(ratio=30)))),
    Method("top-k 1 %, Adam", fg.methods.top_k(0.01)),
    *(filled(f"100x, Adam, nu {nu}", 100, optimizer=adam(nu)) for nu in (0.0, 0.3, 0.5, 0.7, 0.85)),
    *(filled(f"100x, Muon, lead {c}", 100, optimizer=muon(c)) for c in (0.1, 0.3, 0.5, 0.8)),
    Method(
        "100x in DCT blocks, Adam, nu 0.5",
        fg.Recipe(fg.AllGather(fg.chain(DCT, FILLED)), FEEDBACK),
        optimizer=adam(0.5),
    ),
    dataclasses.replace(
        by_ratio("100x in DCT blocks, dense start, Adam, nu 0.5", DCT, 100),
        momentum=True,
        optimizer=adam(0.5),
    ),
    with_memory(
        "100x, decay 0.95, Adam, nu 0.5", fg.ErrorFeedback(decay=0.95), optimizer=adam(0.5)
    ),
    with_memory("100x of each worker's momentum, Adam's root", Momentum(), momentum=False),
    ef21("100x, EF21, Adam"),
    ef21("100x, EF21, Adam without momentum", momentum=False),
    scaled("100x in units of Adam's root, nu 0.5", optimizer=adam(0.5)),
    *(filled(f"300x, Muon, lead {c}", 300, optimizer=muon(c)) for c in (0.5, 0.8)),
    filled("300x, Adam, nu 0.5", 300, optimizer=adam(0.5)),
    renamed("dense, Muon, lead 0.3", "dense", optimizer=muon(0.3)),
    filled("30x, Muon, lead 0.3", 30, optimizer=muon(0.3)),
    filled("30x, Adam, nu 0.7", 30, optimizer=adam(0.7)),
    Method("EDEN 1 bit, Muon, lead 0.3", fg.methods.eden(bits=1), optimizer=muon(0.3)),
    Method("EDEN 2 bits, Muon, lead 0.3", fg.methods.eden(bits=2), optimizer=muon(0.3)),
    Method(
        "EDEN 1 bit of a random third, Muon, lead 0.3",
        fg.Recipe(fg.AllGather(fg.chain(fg.RandomK(0.32, rescale=True), *ONE_BIT))),
        optimizer=muon(0.3),
    ),
    Method(
        "EDEN 1 bit of a random third, feedback, Muon, lead 0.5",
        fg.Recipe(fg.AllGather(fg.chain(fg.RandomK(0.32), *ONE_BIT)), FEEDBACK),
        optimizer=muon(0.5),
    ),
    POWER_SGD,
    renamed("PowerSGD rank 4, Adam, nu 0.7", "PowerSGD rank 4", optimizer=adam(0.7)),
    renamed("PowerSGD rank 4, Muon, lead 0.3", "PowerSGD rank 4", optimizer=muon(0.3)),
    local("4 local steps of Adam, dense", 4, WHOLE, optax.sgd(1.0)),
    local("4 local steps of Adam, dense, outer Nesterov", 4, WHOLE, nesterov(0.7, 0.9)),
    local("4 local steps of Muon, dense", 4, WHOLE, optax.sgd(1.0), **MUON),
    local("4 local steps of Muon, dense, outer Nesterov", 4, WHOLE, nesterov(0.7, 0.9), **MUON),
    # With the averages: 1/4 + 1/12 + 1/24 = 3/8 of the bytes of as many trees; 1/4 + 1/12 = 2/6.
    desynced("4 local steps of Adam, dense, DES-LOC", {"mu": 12, "nu": 24}, 8),
    desynced("4 local steps of Muon, dense, DES-LOC", {"mu": 12}, 6, **MUON),
    *(
        renamed(
            f"Dion2, {fraction:.0%} of the rows",
            "dense",
            optimizer=functools.partial(dion2, fraction=fraction),
        )
        for fraction in (0.25, 0.1)
    ),
    local("4 local steps of Muon, 25x", 4, QUARTER, optax.sgd(1.0), **MUON),
    local("30 local steps of Muon, 4 bits (MuLoCo)", 30, MULOCO, nesterov(0.8, 0.9), **MUON),
    filled("100x, Muon", 100, **MUON),
    scaled("100x in units of Adam's root, Muon", **MUON),
    with_memory("100x of each worker's momentum 0.95, Muon", Momentum(decay=0.95), **MUON),
    Method("EDEN 1 bit, Muon", fg.methods.eden(bits=1), **MUON),
    Method("EDEN 2 bits, Muon", fg.methods.eden(bits=2), **MUON),
    Method(
        "EDEN 1 bit, feedback, Muon", fg.Recipe(fg.methods.eden(bits=1).exchange, FEEDBACK), **MUON
    ),
]


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """Loss and rate of each row, by how it ends."""
    del folder, name
    runs = results["runs"]
    known = {method.name: method for method in METHODS}
    rows: list[list[str]] = []
    for task in dict.fromkeys(run["task"] for run in runs):
        found = chosen(runs, task)
        best = min(means(found, name) for name in DENSE)
        for method, own in found.items():
            loss = means(found, method)
            change = f"{100 * (loss / best - 1):+.1f} %"
            ratio = times(known[method].on_link(own[0], results["workers"]))
            rows.append([task, method, ratio, f"{own[0]['rate']:g}", f"{loss:.3f}", change])
    print(markdown(["task", "method", "on 8 links", "rate", "loss", "to the best dense"], rows))


STUDY = Study(
    folder="convergence",
    file="variants",
    rows=METHODS,
    show=show,
    steps=1000,
    seeds=1,
    rates=(0.5, 1.0, 2.0),
    inside=True,
    devices=False,
    smoke=("dense, Adam", "100x, EF21, Adam", "100x in units of Adam's root, nu 0.5"),
)
