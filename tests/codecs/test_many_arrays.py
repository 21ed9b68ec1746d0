"""Arrays of many kinds through the round trip of every codec, compiled as users compile it.

Many short ones are slow: `pytest -m slow`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS, LOSSLESS, OPTIMIZED, SLOW, sample

import fftgrad as fg
from fftgrad.codecs._chain import stages

TINY = float(np.finfo(np.float32).tiny)

SHRINKING = (
    fg.Budget, fg.Cast, fg.ChunkTopK, fg.Dct, fg.Fft, fg.Hadamard,
    fg.codecs.Identity, fg.LogQuantizer, fg.codecs.MeanMagnitude, fg.codecs.AlternatingSign,
    fg.codecs.RandomK, fg.RangeFloat, fg.Sign, fg.Threshold, fg.TopK,
)  # fmt: skip
"""Stages that move no vector away from itself by more than its length."""


def shrinks(codec):
    """Whether ||x - C(x)|| <= ||x||: it drops, rounds to the nearest or towards zero, no more."""
    return all(isinstance(stage, SHRINKING) for stage in stages(codec))


def constant(rng, shape):
    return np.broadcast_to(rng.standard_normal((shape[0], 1)), shape)


def nearly_equal(rng, shape):
    size = 10.0 ** rng.integers(-8, -2, (shape[0], 1))
    return constant(rng, shape) * (1 + size * rng.standard_normal(shape))


def sparse(rng, shape):
    return rng.standard_t(2, shape) * (rng.random(shape) < 0.1)


def huge_range(rng, shape):
    return rng.choice([-1.0, 1.0], shape) * np.exp2(rng.uniform(-140, 110, shape))


def with_outlier(rng, shape):
    x = rng.standard_normal(shape)
    x[:, shape[1] // 2] *= 1e6
    return x


KINDS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tail": lambda rng, shape: rng.standard_t(2, shape),
    "sparse": sparse,
    "constant": constant,
    "nearly equal": nearly_equal,
    "ties": lambda rng, shape: rng.integers(-2, 3, shape),
    "huge range": huge_range,
    "one outlier": with_outlier,
    "smooth": lambda rng, shape: np.cumsum(rng.standard_normal(shape), axis=1),
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-30,
    "huge": lambda rng, shape: rng.standard_normal(shape) * 1e34,
    "zero": lambda _, shape: np.zeros(shape),
}


def round_trip(codec, row, number):
    """What comes back of a row, with randomness of its own."""
    step = fg.Step.of(jax.random.fold_in(jax.random.key(0), number), 0)
    return fg.decompress(codec, fg.compress(codec, row, step=step), row, step=step)


def own_laws(codec, x, y, unit):
    """Which rows break what this codec claims, by the claim; float64 rows in units of their own."""
    last = stages(codec)[-1]
    n, squares, lost = x.shape[1], np.sum(x**2, 1), np.sum((x - y) ** 2, 1)
    if any(codec == CODECS[name] for name in LOSSLESS):
        yield "every bit comes back", np.any(x != y, axis=1)
    if isinstance(codec, fg.TopK | fg.ChunkTopK | fg.Threshold):
        yield "what is kept is exact", np.any((y != x) & (y != 0), axis=1)
    if isinstance(codec, fg.TopK):
        like = jax.ShapeDtypeStruct((n,), jnp.float32)
        share = jax.eval_shape(lambda a: fg.compress(codec, a), like).main.size / n
        yield "||x - C(x)||² <= (1 - k/n) ||x||²", lost > (1 - share) * squares + 1e-9
    if isinstance(codec, fg.ChunkTopK):
        share = codec.k / min(codec.chunk, n)
        yield "||x - C(x)||² <= (1 - k/c) ||x||²", lost > (1 - share) * squares + 1e-9
    if isinstance(codec, fg.Sign):
        wanted = squares - np.abs(x).sum(1) ** 2 / n
        yield "||x - C(x)||² = ||x||² - ||x||₁² / n", np.abs(lost - wanted) > 1e-5 * squares
    if isinstance(codec, fg.Cast):
        kind = jnp.finfo(codec.dtype)
        size = np.abs(x * unit)
        normal = (size >= float(kind.tiny)) & (size <= float(kind.max))
        bound = np.abs(x) * float(kind.eps) / 2
        yield "a normal value is rounded", np.any(normal & (np.abs(x - y) > bound), axis=1)
    if isinstance(codec, fg.codecs.BinMeans):
        # Of each bin the mean, so what is lost has nothing in common with any function of it.
        moments = [np.sum((x - y) * y**power, axis=1) for power in range(3)]
        yield "a value becomes the mean of its bin", np.max(np.abs(moments), axis=0) > 1e-5 * n
    if isinstance(last, fg.codecs.LloydMax):
        yield "<x, C(x)> = ||x||²", np.abs(np.sum(x * y, axis=1) - squares) > 1e-5 * squares
    if isinstance(codec, fg.UniformQuantizer):
        step = np.sqrt(squares) / (2 ** (codec.bits - 1) - 1)
        yield "no further than the next level", np.abs(x - y).max(1) > step * (1 + 1e-5)
    if isinstance(codec, fg.codecs.Ternary | fg.codecs.AdaComp):
        size = np.abs(y).max(1, keepdims=True)
        wrong = (y != 0) & ((np.abs(y) != size) | (x * y < 0))
        yield "all values have one magnitude, and their own sign", np.any(wrong, axis=1)
    if isinstance(codec, fg.Budget):
        wrong = (y != 0) & (np.abs(x - y) > (3 / 8 + 1e-5) * np.abs(x))
        yield "what is sent is right to 3/8", np.any(wrong, axis=1)
    if isinstance(codec, fg.LogQuantizer):
        wrong = (np.abs(x * unit) >= TINY) & (np.abs(x - y) >= np.abs(x) * (1 - 2**-16))
        yield "no value is worse than not sent", np.any(wrong, axis=1)
    if isinstance(codec, fg.codecs.Transform) and not getattr(codec, "half", False):
        yield "it is undone", lost > 1e-10 * squares


def broken_laws(codec, x, y):
    """Which rows break what holds for this codec, by the law."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    top = np.abs(x).max(1)
    yield "what is finite stays finite", ~np.isfinite(y).all(axis=1)
    if isinstance(codec, fg.codecs.DynamicSign):
        yield "all have one size", np.any(np.abs(y) != codec.scale / 2, axis=1)
        return
    yield "zero comes back as zero", (top == 0) & np.any(y != 0, axis=1)
    # What is below the smallest normal number may count as zero.
    normal = top >= TINY
    x, y, top = x[normal], y[normal], top[normal, None]
    x, y = x / top, y / top
    if shrinks(codec):
        lost = np.sum((x - y) ** 2, axis=1)
        yield "||x - C(x)|| <= ||x||", lost > np.sum(x**2, axis=1) * (1 + 1e-5)
    yield from own_laws(codec, x, y, top)


@pytest.mark.parametrize(
    "shape", [(8, 100), *(pytest.param((9_000, n), marks=SLOW) for n in (7, 24, 65))]
)
@pytest.mark.parametrize("name", sample(CODECS))
def test_arrays_of_many_kinds(name, shape):
    codec, rng = CODECS[name], np.random.default_rng(0)
    one = functools.partial(round_trip, codec)
    run = jax.jit(
        lambda x, n: jax.lax.map(lambda row: one(*row), (x, n)), compiler_options=OPTIMIZED
    )
    for kind, make in KINDS.items():
        x = np.asarray(make(rng, shape), np.float32)
        y = np.asarray(run(x, np.arange(len(x))))
        for law, broken in broken_laws(codec, x, y):
            assert not broken.any(), f"{law}: {kind}, rows {np.flatnonzero(broken)}"
