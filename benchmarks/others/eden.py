"""EDEN and DRIVE by their authors."""

import math
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from others._both import Row, apart, both_ways, imported

import fftgrad as fg

REPOSITORY = "amitport/EDEN-Distributed-Mean-Estimation"
LICENSE = "none"
SIZES = (4096, 5000)
DRAWS = 200


def inputs(name: str, n: int) -> np.ndarray:
    """A vector, float32[n]."""
    rng = np.random.default_rng(3)
    drawn = {"normal": rng.standard_normal, "lognormal": lambda n: rng.lognormal(0, 1, n)}
    return drawn[name](n).astype(np.float32)


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for the rotation, the quantizer, both together, and the error on average."""
    import torch

    hadamard = imported(checkout / "torch", "hadamard")
    eden = imported(checkout / "torch", "eden")

    n = SIZES[0]
    x = inputs("lognormal", n)
    rotated = np.asarray(fg.compress(fg.Hadamard(n, signs=False), jnp.asarray(x)).main)
    expected = hadamard.hadamard_transform_(torch.from_numpy(x.copy())).numpy()
    yield Row(
        "`hadamard_transform_`", "`Hadamard`", f"{n} log-normal values", apart(rotated, expected)
    )
    for bits in (1, 2) if smoke else range(1, 7):
        x = inputs("normal", n)
        quantizer = eden.EdenQuantization(bits)
        expected = quantizer.roundtrip(torch.from_numpy(x.copy()))[0].numpy()
        found = both_ways(fg.codecs.LloydMax(bits, block=n), x)
        name, own = f"`EdenQuantization({bits})`", f"`LloydMax({bits})`"
        same = np.abs(found - expected) < 1e-3 * np.abs(expected).max()
        words, limit = f"{n} normal values", 1e-5
        if not same.all():
            others, limit = int(np.sum(~same)), 1e-4
            differs = "their table of 64 values has five digits; it parts values elsewhere"
            yield Row(name, own, words, others, f"of {n} in another cell", None, differs)
        yield Row(name, own, words, apart(found[same], expected[same]), limit=limit)

    for n in SIZES[: 1 if smoke else None]:
        for bits in (1, 2, 4):
            x, whole = inputs("lognormal", n), 2 ** math.ceil(math.log2(n))
            codec = fg.chain(fg.Hadamard(whole), fg.codecs.LloydMax(bits, block=whole))
            step = fg.Step.of(5)
            signs = torch.from_numpy(_signs(whole, step))
            with mock.patch.object(hadamard, "rademacher_like", return_value=signs):
                expected = eden.eden_builder(bits).roundtrip(torch.from_numpy(x.copy()))[0].numpy()
            found = both_ways(codec, x, step)
            yield Row(
                f"`eden_builder({bits})`",
                f"`Hadamard`, `LloydMax({bits})`",
                f"{n} log-normal values, our random signs",
                apart(found, expected),
                differs="blocks of 4,096 by default; here the whole vector, as there",
            )

    for bits in (1, 2, 4):
        n = SIZES[0]
        x = inputs("lognormal", n)
        given = jnp.asarray(x)
        codec = fg.chain(fg.Hadamard(n), fg.codecs.LloydMax(bits, block=n))

        @jax.jit
        def one(
            key: jax.Array, given: jax.Array = given, codec: fg.codecs.Codec = codec
        ) -> jax.Array:
            step = fg.Step.of(key)
            back = fg.decompress(codec, fg.compress(codec, given, step=step), given, step=step)
            return jnp.sum(jnp.square(back - given)) / jnp.sum(jnp.square(given))

        ours = np.asarray(jax.vmap(one)(jax.random.split(jax.random.key(1), DRAWS)))
        method = eden.eden_builder(bits)
        theirs = np.array([_error(method, x) for _ in range(DRAWS)])
        spread = math.sqrt((ours.var() + theirs.var()) / DRAWS)
        yield Row(
            f"`eden_builder({bits})`, the error on average",
            f"`Hadamard`, `LloydMax({bits})`",
            f"{n} log-normal values, {DRAWS} draws each: {theirs.mean():.4f}, ours "
            f"{ours.mean():.4f}",
            float(abs(ours.mean() - theirs.mean()) / spread),
            "standard errors",
            4.0,
            "draws of their own",
        )


def _signs(n: int, step: fg.Step) -> np.ndarray:
    """The signs that `Hadamard` draws: what it makes of ones, turned back without any."""
    ones = jnp.ones(n)
    rotated = fg.compress(fg.Hadamard(n), ones, step=step)
    return np.round(np.asarray(fg.decompress(fg.Hadamard(n, signs=False), rotated, ones)))


def _error(method: Any, x: np.ndarray) -> float:
    import torch

    back = method.roundtrip(torch.from_numpy(x.copy()))[0].numpy()
    return float(np.sum((back - x) ** 2) / np.sum(x**2))
