"""A million short arrays of many kinds through the round trip of every codec.

It prints how many there were, and the worst of what came back: `pytest -m slow -s`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS, LOSSLESS

import fftgrad as fg
from fftgrad.codecs._chain import stages

LENGTHS = {7: 200_000, 24: 600_000, 65: 200_000}
BATCH = 20_000
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
TINY = float(np.finfo(np.float32).tiny)

SHRINKING = (
    fg.Budget, fg.Cast, fg.ChunkTopK, fg.Dct, fg.Fft, fg.FixedRangeFloat, fg.Hadamard,
    fg.Identity, fg.LogLevels, fg.OneMean, fg.OneSided, fg.RandomK, fg.RangeFloat, fg.Sign,
    fg.Threshold, fg.TopK,
)  # fmt: skip
"""Stages that move no vector away from itself by more than its length, but for some options."""


def shrinks(codec):
    """Whether ||x - C(x)|| <= ||x||: it drops, rounds to the nearest or towards zero, no more."""
    return all(
        isinstance(stage, SHRINKING)
        and getattr(stage, "rounding", "") != "stochastic"
        and getattr(stage, "zero", True)
        and not getattr(stage, "rescale", False)
        for stage in stages(codec)
    )


def normal(rng, shape):
    return rng.standard_normal(shape)


def ties(rng, shape):
    return rng.integers(-2, 3, shape)


def constant(rng, shape):
    return np.broadcast_to(rng.standard_normal((shape[0], 1)), shape)


def sparse(rng, shape):
    return rng.standard_t(2, shape) * (rng.random(shape) < 0.1)


def huge_range(rng, shape):
    return rng.choice([-1.0, 1.0], shape) * np.exp2(rng.uniform(-140, 110, shape))


def with_outlier(rng, shape):
    x = rng.standard_normal(shape)
    x[:, shape[1] // 2] *= 1e6
    return x


def smooth(rng, shape):
    return np.cumsum(rng.standard_normal(shape), axis=1)


KINDS = {
    "normal": normal,
    "heavy tail": lambda rng, shape: rng.standard_t(2, shape),
    "sparse": sparse,
    "constant": constant,
    "ties": ties,
    "huge range": huge_range,
    "one outlier": with_outlier,
    "smooth": smooth,
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-30,
    "huge": lambda rng, shape: rng.standard_normal(shape) * 1e34,
    "zero": lambda _, shape: np.zeros(shape),
}


@functools.cache
def arrays(n):
    """float32[LENGTHS[n], n], kind after kind, and where each kind begins and ends."""
    rng = np.random.default_rng(n)
    ends = np.linspace(0, LENGTHS[n], len(KINDS) + 1).astype(int)
    spans = dict(zip(KINDS, itertools.pairwise(ends), strict=True))
    rows = [np.asarray(KINDS[k](rng, (end - at, n)), np.float32) for k, (at, end) in spans.items()]
    return np.concatenate(rows), spans


def round_trips(codec, x):
    """What comes back of each row, with randomness of its own."""

    def one(row, number):
        step = fg.Step.of(jax.random.fold_in(jax.random.key(0), number), 0)
        return fg.decompress(codec, fg.compress(codec, row, step=step), row, step=step)

    run = jax.jit(jax.vmap(one), compiler_options=OPTIMIZED)
    numbers = jnp.arange(BATCH)
    return np.concatenate([run(x[i : i + BATCH], numbers + i) for i in range(0, len(x), BATCH)])


def own_laws(codec, x, y, unit):
    """Which rows break what this codec claims, by the claim; float64 rows in units of their own."""
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
    if isinstance(codec, fg.Transform) and not getattr(codec, "half", False):
        yield "it is undone", lost > 1e-10 * squares


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_a_million_arrays(name, capsys):
    codec = CODECS[name]
    count, worst, largest = 0, (0.0, ""), (0.0, "")
    for n in LENGTHS:
        x, kinds = arrays(n)
        y = round_trips(codec, x)
        count += len(x)
        assert y.shape == x.shape
        assert np.isfinite(y).all()
        for kind, (start, end) in kinds.items():
            own, back = x[start:end].astype(np.float64), y[start:end].astype(np.float64)
            top = np.abs(own).max(1)
            where = f"{kind}, {n} values"
            if isinstance(codec, fg.DynamicSign):
                assert set(np.unique(np.abs(back))) == {codec.scale / 2}, where
                continue
            assert not back[top == 0].any(), where
            own, back, top = own[top > 0], back[top > 0], top[top > 0]
            if not len(own):
                continue
            peak = float(np.max(np.abs(back).max(1) / np.maximum(top, TINY)))
            largest = max(largest, (peak, where))
            # What is below the smallest normal number may count as zero.
            if top.min() < TINY:
                continue
            own, back = own / top[:, None], back / top[:, None]
            squares, lost = np.sum(own**2, 1), np.sum((own - back) ** 2, 1)
            worst = max(worst, (float(np.sqrt(np.max(lost / squares))), where))
            if shrinks(codec):
                assert np.all(lost <= squares * (1 + 1e-5)), where
            for law, broken in own_laws(codec, own, back, top[:, None]):
                assert not broken.any(), f"{law}: {where}: {own[broken][0] * top[broken][0]}"
    assert count >= 1_000_000
    if not codec.unbiased:
        assert largest[0] <= 8, largest
    with capsys.disabled():
        error, at = worst
        print(f"\n{name}: {count:,} arrays, worst error {error:.3g} ({at})", end="")
        print(f", largest value {largest[0]:.3g} times the largest that was there", end="")
