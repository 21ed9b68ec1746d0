"""The one table: every codec, memory, exchange, method and leaf shape that the laws run over."""

import dataclasses
import functools
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import fftgrad as fg
from fftgrad.codecs._chain import stages
from fftgrad.contrib import learned

CODECS: dict[str, fg.codecs.Codec] = {
    "identity": fg.codecs.Identity(),
    "bfloat16": fg.Cast("bfloat16"),
    "float16": fg.Cast("float16"),
    "fft": fg.Fft(block=16),
    "fft whole": fg.Fft(block=None),
    "fft whole half": fg.Fft(block=None, half=True),
    "dct": fg.Dct(block=16),
    "hadamard": fg.Hadamard(block=32),
    "hadamard unsigned": fg.Hadamard(block=128, signs=False),
    "top-k": fg.TopK(fraction=0.1),
    "top-k one": fg.TopK(k=1),
    "top-k all": fg.TopK(fraction=1.0),
    "range float": fg.RangeFloat(bits=8),
    "range float truncate": fg.RangeFloat(bits=10, rounding="truncate"),
    "range float fixed": fg.RangeFloat(bits=8, mantissa=3, limits=(-1.0, 2.0)),
    "log levels": fg.LogQuantizer(bits=5),
    "top-k 4 bits": fg.chain(fg.TopK(fraction=0.1), fg.LogQuantizer(bits=4)),
    "blocked 4 bits": fg.chain(fg.Fft(block=16), fg.TopK(fraction=0.2), fg.LogQuantizer(bits=4)),
    "budget": fg.Budget(ratio=6),
    "budget of spectra": fg.chain(fg.Fft(block=16), fg.Budget(ratio=10)),
    "top-k 6 bits": fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=6)),
    "top-k bfloat16": fg.chain(fg.TopK(k=5), fg.Cast("bfloat16")),
    "blocked": fg.chain(fg.Fft(block=16), fg.TopK(fraction=0.2), fg.RangeFloat(bits=8)),
    "paper": fg.chain(
        fg.Fft(block=None, half=True), fg.TopK(fraction=0.15), fg.RangeFloat(bits=10)
    ),
    "blocked dct": fg.chain(fg.Dct(block=16), fg.TopK(fraction=0.2), fg.RangeFloat(bits=8)),
    "few of blocks": fg.chain(fg.Fft(block=4), fg.TopK(k=1), fg.RangeFloat(bits=8)),
    "threshold": fg.Threshold(fraction=0.1),
    "threshold exact": fg.Threshold(fraction=0.1, search="exact"),
    "one mean": fg.chain(
        fg.codecs.AlternatingSign(), fg.Threshold(fraction=0.1, reuse=2), fg.codecs.MeanMagnitude()
    ),
    "chunk top-k": fg.ChunkTopK(chunk=10),
    "chunk top-k of spectra": fg.chain(fg.Fft(block=16), fg.ChunkTopK(chunk=8, k=3)),
    "chunk top-k, many": fg.ChunkTopK(chunk=16, k=3),
    "chunk top-k, all": fg.ChunkTopK(chunk=8, k=8),
    "bin means": fg.codecs.BinMeans(),
    "tiles": fg.chain(
        fg.codecs.Tiles(block=16), fg.ChunkTopK(chunk=16, k=5), fg.codecs.BinMeans(bits=3)
    ),
    "random-k": fg.codecs.RandomK(fraction=0.25),
    "adacomp": fg.codecs.AdaComp(bin_size=20),
    "sign": fg.Sign(),
    "dynamic sign": fg.codecs.DynamicSign(scale=8.0, decay=0.9),
    "levels": fg.UniformQuantizer(bits=4, bucket=40),
    "levels max": fg.UniformQuantizer(bits=2, norm="max"),
    "ternary": fg.codecs.Ternary(clip=None),
    "ternary clipped": fg.codecs.Ternary(),
    "lloyd-max": fg.chain(fg.Hadamard(block=32), fg.codecs.LloydMax(bits=2, block=32)),
    "rotated and rotated": fg.chain(
        fg.Hadamard(block=8), fg.Dct(block=16), fg.UniformQuantizer(bits=6)
    ),
    "random spectrum": fg.chain(fg.Fft(block=16), fg.codecs.RandomK(fraction=0.5)),
    "random levels": fg.chain(
        fg.Hadamard(block=8), fg.codecs.RandomK(k=16), fg.UniformQuantizer(bits=4)
    ),
    "cosines of rotations": fg.chain(fg.Dct(block=8), fg.Hadamard(block=16), fg.TopK(k=9)),
}

TILED: dict[tuple[int, ...], fg.codecs.Codec] = {
    (10, 11): fg.chain(fg.Dct(block=4, shape=(10, 11)), fg.ChunkTopK(chunk=16, k=16)),
    (3, 4, 5): fg.chain(fg.Dct(block=8, shape=(12, 5)), fg.ChunkTopK(chunk=64, k=64)),
    (7,): fg.Dct(shape=(1, 7)),
    (1, 1009): fg.codecs.Tiles(block=64, shape=(1, 1009)),
    (11, 10): fg.chain(fg.codecs.Tiles(block=4, shape=(11, 10)), fg.ChunkTopK(chunk=16, k=16)),
    (): fg.Dct(shape=(1, 1)),
}
"""Codecs that are made for one shape."""

LOSSLESS = {"identity", "top-k all"}
"""Bit for bit."""

HIDES_NONFINITE = {"range float fixed", "dynamic sign"}
"""Codecs that on their own may turn a NaN or an infinity into a number, and say so."""

OWN_SCALE = {"dynamic sign"}
"""Codecs whose answer has a size that does not come from the values, and say so."""

DECAYED = fg.ErrorFeedback(decay=0.95)
MEMORIES: dict[str, fg.memories.Memory] = {
    "none": fg.NoMemory(),
    "feedback": fg.ErrorFeedback(),
    "decayed feedback": fg.ErrorFeedback(decay=0.9),
    "low-pass": fg.ErrorFeedback(beta=0.3),
    "narrow feedback": fg.ErrorFeedback(dtype="bfloat16"),
    "momentum": fg.memories.MomentumCorrection(momentum=0.9),
    "Nesterov": fg.memories.MomentumCorrection(momentum=0.9, nesterov=True),
}

NET = learned.Autoencoder(encoder=(3, 2), code=2, decoder=(2, 3))
"""Small, to compile."""

EXCHANGES: dict[str, fg.exchanges.Exchange] = {
    "dense": fg.AllReduce(),
    "spectral sum": fg.AllReduce(fg.Fft(block=16)),
    "gather identity": fg.AllGather(fg.codecs.Identity()),
    "gather bfloat16": fg.AllGather(CODECS["bfloat16"]),
    "gather top-k": fg.AllGather(CODECS["top-k 6 bits"]),
    "gather blocked": fg.AllGather(CODECS["blocked"]),
    "gather paper": fg.AllGather(CODECS["paper"]),
    "gather dct": fg.AllGather(CODECS["blocked dct"]),
    "gather few of blocks": fg.AllGather(CODECS["few of blocks"]),
    "gather adaptive": fg.AllGather(CODECS["one mean"]),
    "random sum": fg.AllReduce(fg.codecs.RandomK(fraction=0.25)),
    "shared support": fg.exchanges.LeaderTopK(fg.TopK(fraction=0.1)),
    "shared frequencies": fg.exchanges.LeaderTopK(
        fg.chain(fg.Fft(block=16), fg.ChunkTopK(chunk=4))
    ),
    "two stages, top-k": fg.TwoStage(fg.chain(fg.TopK(k=40), fg.RangeFloat(bits=8)), workers=4),
    "gather budget": fg.AllGather(fg.Budget(ratio=5)),
    "two stages, budget": fg.TwoStage(fg.Budget(ratio=3.7), workers=4),
    "two stages": fg.TwoStage(fg.Sign(), workers=4),
    "eigenbasis": fg.Eigenbasis(fg.TwoStage(fg.Budget(ratio=3.7), workers=4), every=2),
    "two stages, one sign": fg.TwoStage(CODECS["one mean"], workers=4),
    "gather rotations": fg.AllGather(CODECS["random levels"]),
    "shared rotations": fg.exchanges.LeaderTopK(CODECS["cosines of rotations"]),
    "counted sum": fg.AllReduce(fg.Fft(block=16, half=True)),
    "integer sum": fg.exchanges.QuantizedAllReduce(workers=4),
    "votes": fg.contrib.votes.TopVotes(workers=4, k=5),
    "votes, noisy": fg.contrib.votes.TopVotes(workers=4, fraction=0.5, sigma=0.5, clip=1.0),
    "low rank": fg.PowerSgd(rank=2),
    "low rank in turns": fg.exchanges.AcpSgd(rank=2),
    "warm-up": fg.Scheduled({0: fg.AllReduce(), 2: fg.AllGather(CODECS["blocked"])}),
    "learned codes": learned.LearnedCodes(
        fg.TopK(fraction=0.1), until=2, innovation=0.01, rate=0.1, autoencoder=NET
    ),
    "summed codes": learned.LearnedCodes(
        fg.ChunkTopK(chunk=8), until=0, variant="all_reduce", autoencoder=NET
    ),
    "ladder": fg.exchanges.Ladder((fg.AllGather(CODECS["top-k one"]), fg.AllReduce())),
}

SLOW = pytest.mark.slow
EVERY_CASE = pytest.mark.every_case
SEED = int(os.environ.get("FFTGRAD_SEED", "0"))
"""Draws which rows of a dear law the default runs: printed in pytest's header."""


@functools.cache
def kinds(name: str) -> frozenset:
    """What a row of a table is a kind of: no law goes without one of each kind."""
    found = {name.split()[0]} if name in METHODS else set()
    if name in CODECS:
        found |= _kinds_of_codec(CODECS[name])
    if name in EXCHANGES:
        found |= _kinds_of_exchange(EXCHANGES[name])
    if name in HIERARCHIES:
        found.add(type(HIERARCHIES[name].slow))
    if name in MEMORIES:
        found |= {type(MEMORIES[name]), getattr(MEMORIES[name], "dtype", None)}
    return frozenset(found)


def _kinds_of_codec(codec):
    """Its class; or, of a chain, its length and the classes that are in chains only."""
    alone = {type(row) for row in CODECS.values() if len(stages(row)) == 1}
    parts = stages(codec)
    return {len(parts), *(type(p) for p in parts if len(parts) == 1 or type(p) not in alone)}


def _kinds_of_exchange(exchange):
    """Its class, with a state and without, and what it is told by a word or another part."""
    options = {f"{f.name}={getattr(exchange, f.name)}" for f in dataclasses.fields(exchange)}
    told = {option for option in options if option.startswith(("noise", "variant"))}
    state = jax.eval_shape(exchange.init, jax.ShapeDtypeStruct((150,), "float32"))
    return {type(exchange), (type(exchange), bool(jax.tree.leaves(state))), *told}


def drawn(rows, kinds=kinds, *, always=()) -> set:
    """The rows that the default runs of a law: `always`, and of every kind one that is drawn."""
    order = sorted(rows, key=lambda row: hashlib.sha256(f"{SEED} {row}".encode()).digest())
    taken, seen = set(always), set()
    for row in (*always, *order):
        if kinds(row) - seen:
            taken.add(row)
            seen |= kinds(row)
    return taken


def sample(rows, kinds=kinds, *, always=(), marks=(), others=SLOW):
    """Parametrize an expensive test: one row of each kind; the other rows have another mark.

    Args:
      rows: names of codecs, exchanges or methods; or any others, with `kinds` of their own.
      kinds: a function from a row to the set of its kinds.
      always: rows that are never left out.
      marks: marks of the rows that are drawn.
      others: mark of the other rows.
    """
    rows = list(rows)
    taken = drawn(rows, kinds, always=always)
    params = {row: row if isinstance(row, tuple) else (row,) for row in rows}
    marks_of = {row: marks if row in taken else others for row in rows}
    return [
        pytest.param(*values, id="-".join(map(str, values)), marks=marks_of[row])
        for row, values in params.items()
    ]


one_of_each = functools.partial(sample, marks=EVERY_CASE)
"""Parametrize a law: a `sample`, of which the default layer runs all rows that are drawn."""


HIERARCHIES: dict[str, fg.Hierarchical] = {
    "slow gather": fg.Hierarchical("fast", 4, fg.AllGather(CODECS["top-k 6 bits"])),
    "slow gather, blocked": fg.Hierarchical("fast", 4, fg.AllGather(CODECS["blocked"])),
    "slow gather, no memory": fg.Hierarchical(
        "fast", 4, fg.AllGather(CODECS["levels"]), fg.NoMemory()
    ),
    "slow all-reduce": fg.Hierarchical("fast", 4, fg.AllReduce()),
    "slow shared support": fg.Hierarchical(
        "fast", 4, fg.exchanges.LeaderTopK(fg.chain(fg.Fft(block=8), fg.TopK(fraction=0.1)))
    ),
    "slow two stages": fg.Hierarchical("fast", 4, fg.TwoStage(fg.Sign(), workers=2)),
    "slow warm-up": fg.Hierarchical("fast", 4, EXCHANGES["warm-up"]),
}
"""Exchanges over two axes, ("slow", "fast") of 2 and 4 workers."""

RECIPES: dict[str, fg.Recipe] = {
    "fft_sparsification": fg.methods.fft_sparsification(),
    "fft_sparsification blocked": dataclasses.replace(
        fg.methods.fft_sparsification(theta=0.9, bits=8, block=64), memory=fg.ErrorFeedback()
    ),
    "fft_sparsification diminishing": fg.methods.fft_sparsification(
        theta_schedule={0: 0.9, 1: 0.5, 3: 0.0}
    ),
    "fft_sparsification recovery": fg.methods.fft_sparsification(recover=(0.5, 0.0)),
    "acp_sgd": fg.methods.acp_sgd(rank=2),
    "adacomp": fg.methods.adacomp(conv_bin=10, bin_size=20),
    "eden": fg.methods.eden(bits=2, block=64),
    "lgc": learned.lgc(
        0.1, dense=("last", "scalar"), dense_steps=1, learning_steps=2, autoencoder=NET
    ),
    "power_sgd": fg.methods.power_sgd(rank=2),
    "qsgd": fg.methods.qsgd(bits=4, bucket=32),
    "random_k": fg.methods.random_k(0.1),
    "redsync": fg.methods.redsync(0.1, dense_below=100, trimmed_below=300),
    "redsync quantized": fg.methods.redsync(
        0.1, quantize=True, output=("scalar",), dense_below=100, trimmed_below=300
    ),
    "scalecom": fg.methods.scalecom(10, beta=0.3),
    "sign_sgd": fg.methods.sign_sgd(),
    "terngrad": fg.methods.terngrad(dense=("scalar",)),
    "terngrad summed": fg.methods.terngrad(workers=4),
}


def averaged(recipe, axis):
    return fg.compressed_pmean(recipe, axis_name=axis)


METHODS = {name: functools.partial(averaged, recipe) for name, recipe in RECIPES.items()} | {
    "feedback_adam": lambda axis: fg.optimizers.feedback_adam(
        0.1, fg.methods.top_k(0.2, 4, memory=DECAYED), lead=1.0, axis_name=axis
    ),
    "feedback_muon": lambda axis: fg.optimizers.feedback_muon(
        0.1, fg.methods.top_k(0.2, 4), axis_name=axis
    ),
    "scale_by_datalens": lambda axis: fg.contrib.votes.scale_by_datalens(
        fg.contrib.votes.TopVotes(workers=4, fraction=0.1), beta=0.25, axis_name=axis
    ),
    "demo": lambda axis: optax.chain(
        fg.compressed_pmean(fg.methods.demo(k=4, block=8), axis_name=axis), optax.scale_by_sign()
    ),
    "diloco": lambda axis: fg.optimizers.diloco(
        optax.sgd(0.1), optax.sgd(0.7, 0.9, nesterov=True), sync_every=2, axis_name=axis
    ),
    "scale_by_dion": lambda axis: fg.methods.scale_by_dion(rank=2, axis_name=axis),
    "beer": lambda axis: fg.contrib.gossip.beer(
        optax.sgd(0.1),
        fg.chain(fg.TopK(fraction=0.2), fg.LogQuantizer(bits=4)),
        fg.contrib.gossip.ring(4),
        gamma=0.4,
        axis_name=axis,
    ),
    "beer one bit": lambda axis: fg.contrib.gossip.beer(
        optax.sgd(0.1),
        fg.codecs.DynamicSign(scale=1.0, decay=0.98),
        fg.contrib.gossip.torus(2, 2),
        gamma=0.4,
        gradients=fg.codecs.DynamicSign(scale=8.0, decay=0.98),
        axis_name=axis,
    ),
    "choco_sgd": lambda axis: fg.contrib.gossip.choco_sgd(
        optax.sgd(0.1, momentum=0.9), fg.Sign(), np.full((4, 4), 0.25), gamma=0.4, axis_name=axis
    ),
    "dgc": lambda axis: optax.chain(
        fg.training.clip_by_local_norm(1.0),
        fg.compressed_pmean(fg.methods.dgc(0.1), axis_name=axis),
    ),
    "scale_by_majority_vote": lambda axis: fg.methods.scale_by_majority_vote(axis_name=axis),
    "scale_by_one_bit_adam": lambda axis: fg.methods.scale_by_one_bit_adam(
        3, workers=4, axis_name=axis
    ),
    "sharded": lambda axis: fg.optimizers.sharded(optax.adam(0.1), 4, axis_name=axis),
    "sparse_loco": lambda axis: fg.optimizers.sparse_loco(
        optax.sgd(0.1), sync_every=2, k=4, block=4, axis_name=axis
    ),
    "top_k": lambda axis: fg.compressed_pmean(
        fg.methods.top_k(0.1), bucketing=fg.Bucketing("leaf"), axis_name=axis
    ),
}

PLATFORMS = ("cpu", "cuda", "tpu")
DTYPES = {"bfloat16", "float16"}
"""Names of rows that are parameters of many other tests, too."""
ROWS = sorted({*CODECS, *EXCHANGES, *METHODS} - DTYPES, key=lambda row: (-len(row), row))


@functools.cache
def group_of(test: str) -> str:
    """What a test, by its id, shares programs with: the row that it is of, or else its module."""
    module, _, name = test.partition("::")
    parameters = f"-{name.partition('[')[2].rpartition(']')[0]}-"
    for platform in PLATFORMS:  # the caches are cleared when it changes
        if f"-{platform}-" in parameters:
            return f"{module} {platform}"
    return next((row for row in ROWS if f"-{row}-" in parameters), module)


OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""How users compile; the suite does without, to save time, but then XLA rounds otherwise."""

SHAPES = [(), (1,), (7,), (64,), (10, 11), (3, 4, 5), (1009,)]

TREE = {
    "scalar": jax.ShapeDtypeStruct((), jnp.float32),
    "layers": [
        {
            "w": jax.ShapeDtypeStruct((10, 11), jnp.float32),
            "b": jax.ShapeDtypeStruct((7,), "bfloat16"),
        },
        {"w": jax.ShapeDtypeStruct((3, 4, 5), jnp.float32), "b": None},
    ],
    "empty": jax.ShapeDtypeStruct((0, 3), jnp.float32),
}
"""A gradient: several dtypes, a scalar, an empty leaf, a missing one."""


def floats(exponent: int) -> st.SearchStrategy[float]:
    """Normal float32 numbers of magnitude up to 2**exponent, and zero."""
    bound = 2.0**exponent
    return st.floats(-bound, bound, width=32, allow_subnormal=False)


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Heavy-tailed and serially correlated, as gradients are; never constant, never zero."""
    rng = np.random.default_rng(seed)
    white = rng.standard_t(3, int(np.prod(shape)) + 1)
    return (white[1:] + 0.5 * white[:-1]).reshape(shape).astype(np.float32)


def gradients(tree, workers: int, seed: int = 0):
    """One gradient for each worker, stacked: related, but not equal."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for i, leaf in enumerate(leaves):
        common = values(leaf.shape, seed + 1000 * i)
        own = np.stack([values(leaf.shape, seed + 1000 * i + w + 1) for w in range(workers)])
        out.append((common[None] + own).astype(leaf.dtype))
    return jax.tree.unflatten(structure, out)
