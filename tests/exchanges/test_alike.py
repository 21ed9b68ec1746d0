"""Parts that are alike go through one program: as if each had its own, and in fewer kernels."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EXCHANGES, gradients, values
from parallel import AXIS, everywhere
from stepwise import once

import fftgrad as fg
from fftgrad.exchanges import _parts
from fftgrad.ops import _shapes

WORKERS = 4
QUICK = {"gather top-k", "shared support", "low rank"}
PRODUCTS = {
    name
    for name, exchange in EXCHANGES.items()
    if any(word in repr(exchange) for word in ("Dct", "Hadamard", "Fft", "PowerSgd", "AcpSgd"))
}
ALIKE = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in {"a": (60,), "b": (7, 9), "c": (60,), "d": (60,), "e": (7, 9)}.items()
}


def apart(keys):
    return [[i] for i, _ in enumerate(keys)]


def two_steps(exchange):
    """Mean, error and stats of two steps of one program."""

    def step(state, given):
        x, number = given
        out = exchange.mean(x, state, fg.exchanges.Comm(AXIS, fg.Step.of(3, number)))
        return out.state, (out.mean, out.error, out.stats.finite, out.stats.overflow)

    def worker(rows):
        start = exchange.init(jax.tree.map(lambda a: a[0], rows))
        return jax.lax.scan(step, start, (rows, jnp.arange(2)))[1]

    both = (gradients(ALIKE, WORKERS, seed) for seed in (0, 50))
    rows = jax.tree.map(lambda *a: np.stack(a, axis=1), *both)
    return jax.jit(jax.vmap(worker, axis_name=AXIS))(rows)


def drawn_or_too_many(_, like):
    """A codec that draws, for two leaves, and one that counts overflow, for three."""
    return fg.codecs.AdaComp(10, per_bin=0.2) if like.ndim == 1 else fg.codecs.RandomK(k=9)


BY_LEAF = {"by leaf": fg.AllGather(drawn_or_too_many, clip_to_median=True)}
ROWS = EXCHANGES | BY_LEAF


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK | set(BY_LEAF) else pytest.param(n, marks=pytest.mark.slow) for n in ROWS],
)
def test_each_part_gets_what_it_gets_on_its_own(name, monkeypatch):
    together = two_steps(ROWS[name])
    assert name not in BY_LEAF or np.all(together[3] > 1)
    monkeypatch.setattr(_parts, "alike", apart)
    own = two_steps(ROWS[name])
    # Products of matrices may be summed in another order for several than for one.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    equal = close if name in PRODUCTS else np.testing.assert_array_equal
    jax.tree.map(equal, together, own)


def test_parts_of_one_shape_keep_codecs_of_their_own():
    rule = {"a": fg.TopK(k=3), "c": fg.TopK(k=5), "d": fg.codecs.Identity()}
    exchange = fg.AllGather(lambda name, _: rule[name])
    x = {name: values((1, 60), seed) for seed, name in enumerate(rule)}
    tx = fg.compressed_pmean(exchange, axis_name=AXIS)
    means = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name=AXIS))(x)
    kept = {name: np.count_nonzero(mean) for name, mean in means.items()}
    assert kept == {"a": 3, "c": 5, "d": 60}


def test_many_alike_are_one_program():
    """What is compiled does not grow with the leaves, but where their values are put."""

    def operations(leaves):
        x = (np.zeros((1, 60), np.float32),) * leaves
        exchange = fg.AllGather(fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=6)))
        text = everywhere("vmap", lambda x: once(exchange, x).mean, 1).lower(x).as_text()
        return len(re.findall(r"stablehlo\.(?!constant)", text))  # of which no kernel comes

    few, many = operations(_shapes.FEW), operations(_shapes.FEW + 18)
    assert many - few < 18 * 8


@pytest.mark.usefixtures("platform")
def test_one_after_the_other_is_side_by_side():
    codec, size = fg.TopK(fraction=0.01), _parts.SMALL + 1
    x = tuple(values((size,), seed) for seed in range(3))
    mean = everywhere("vmap", lambda *x: once(fg.AllGather(codec), x).mean, 1)
    means = mean(*(leaf[None] for leaf in x))
    alone = jax.jit(lambda x: fg.decompress(codec, fg.compress(codec, x), x))
    for got, leaf in zip(means, x, strict=True):
        np.testing.assert_array_equal(got[0], alone(leaf))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_what_is_drawn_to_encode_is_drawn_to_decode(impl):
    """Long parts are encoded one after the other, and their short payloads side by side."""
    key = jax.random.key(0, impl=impl)
    tx = fg.compressed_pmean(
        fg.AllReduce(fg.codecs.RandomK(k=500)),
        axis_name=AXIS,
        bucketing=fg.Bucketing("leaf"),
        key=key,
    )
    x = {name: values((1, _parts.SMALL + 1), i) for i, name in enumerate("ab")}
    means = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name=AXIS))(x)
    for name, mean in jax.tree.map(np.asarray, means).items():
        assert np.count_nonzero(mean) == 500
        np.testing.assert_array_equal(mean[mean != 0], x[name][mean != 0])
