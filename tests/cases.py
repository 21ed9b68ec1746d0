"""The one table: every codec, memory, exchange, method and leaf shape that the laws run over."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import fftgrad as fg

CODECS: dict[str, fg.Codec] = {
    "identity": fg.Identity(),
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
    "range float stochastic": fg.RangeFloat(bits=5, rounding="stochastic"),
    "range float fixed": fg.RangeFloat(bits=8, mantissa=3, maximum=2.0, eps=0.125),
    "range float no zero": fg.RangeFloat(bits=3, zero=False),
    "top-k 6 bits": fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=6)),
    "top-k bfloat16": fg.chain(fg.TopK(k=5), fg.Cast("bfloat16")),
    "blocked": fg.chain(fg.Fft(block=16), fg.TopK(fraction=0.2), fg.RangeFloat(bits=8)),
    "blocked stochastic": fg.chain(
        fg.Fft(block=16), fg.TopK(fraction=0.3), fg.RangeFloat(bits=4, rounding="stochastic")
    ),
    "paper": fg.chain(
        fg.Fft(block=None, half=True), fg.TopK(fraction=0.15), fg.RangeFloat(bits=10)
    ),
    "blocked dct": fg.chain(fg.Dct(block=16), fg.TopK(fraction=0.2), fg.RangeFloat(bits=8)),
    "rotated": fg.chain(fg.Hadamard(block=32), fg.RangeFloat(bits=4, rounding="stochastic")),
    "unbiased fft": fg.chain(fg.Fft(block=16), fg.RangeFloat(bits=5, rounding="stochastic")),
}

LOSSLESS = {"identity", "top-k all"}
"""Bit for bit."""

HIDES_NONFINITE = {"range float fixed"}
"""Codecs that on their own may turn a NaN or an infinity into a number, and say so."""

MEMORIES: dict[str, fg.Memory] = {
    "none": fg.NoMemory(),
    "feedback": fg.ErrorFeedback(),
    "decayed feedback": fg.ErrorFeedback(decay=0.9),
}

EXCHANGES: dict[str, fg.Exchange] = {
    "dense": fg.AllReduce(),
    "spectral sum": fg.AllReduce(fg.Fft(block=16)),
    "gather identity": fg.AllGather(fg.Identity()),
    "gather bfloat16": fg.AllGather(CODECS["bfloat16"]),
    "gather top-k": fg.AllGather(CODECS["top-k 6 bits"]),
    "gather blocked": fg.AllGather(CODECS["blocked"]),
    "gather paper": fg.AllGather(CODECS["paper"]),
    "gather dct": fg.AllGather(CODECS["blocked dct"]),
    "gather rotated": fg.AllGather(CODECS["rotated"]),
    "gather stochastic": fg.AllGather(CODECS["blocked stochastic"]),
    "warm-up": fg.Piecewise({0: fg.AllReduce(), 2: fg.AllGather(CODECS["blocked"])}),
}

METHODS = {
    "fft_sparsification": lambda axis: fg.methods.fft_sparsification(axis_name=axis),
    "fft_sparsification blocked": lambda axis: fg.methods.fft_sparsification(
        theta=0.9, bits=8, block=64, memory=fg.ErrorFeedback(), axis_name=axis
    ),
    "fft_sparsification diminishing": lambda axis: fg.methods.fft_sparsification(
        theta_schedule={0: 0.9, 1: 0.5, 3: 0.0}, axis_name=axis
    ),
}

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
        out.append(jnp.asarray(common[None] + own).astype(leaf.dtype))
    return jax.tree.unflatten(structure, out)
