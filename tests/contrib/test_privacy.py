"""The accountant is the closed form, and what it counts is what the program sends."""

import dataclasses
import math

import dp_accounting
import jax
import numpy as np
import pytest

import fftgrad as fg
from fftgrad.contrib import votes as privacy

LIKE = {
    "a": jax.ShapeDtypeStruct((20, 30), "bfloat16"),
    "b": jax.ShapeDtypeStruct((399,), "float32"),
    "c": jax.ShapeDtypeStruct((), "float32"),
}
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]


def by_hand(k, sigma, steps, delta):
    """The best order of T · 2 a k / sigma², turned into epsilon as by Canonne et al., 2020."""
    best = math.inf
    for a in ORDERS:
        rdp = steps * 2 * a * k / sigma**2
        best = min(best, rdp + math.log1p(-1 / a) - math.log(delta * a) / (a - 1))
    return max(best, 0.0)


@pytest.mark.parametrize("delta", [1e-5, 1e-8])
@pytest.mark.parametrize("steps", [1, 100, 10_000])
@pytest.mark.parametrize(("k", "sigma"), [(1, 1.0), (25, 100.0), (300, 7.5), (10, 5000.0)])
def test_the_accountant_is_the_closed_form_at_its_best_order(k, sigma, steps, delta):
    like, given = np.zeros(1000, np.float32), {"steps": steps, "delta": delta}
    found, silent = (
        privacy.epsilon(privacy.TopVotes(workers=1000, k=k, sigma=noise), like, **given)
        for noise in (sigma, 0.0)
    )
    assert found == pytest.approx(by_hand(k, sigma, steps, delta), rel=1e-9)
    # Above what is exactly right for Gaussians, which add up to one; but for a small one by little.
    multiplier = sigma / math.sqrt(4 * k * steps)
    exact = dp_accounting.get_epsilon_gaussian(multiplier, delta)
    assert exact <= found * (1 + 1e-9)
    if 0.3 < exact < 10:
        assert found <= 1.3 * exact
    assert silent == math.inf


BUCKETINGS = {
    "model": fg.Bucketing(),
    "leaf": fg.Bucketing("leaf"),
    "groups": fg.Bucketing(lambda path, _: "ab" if path in "ab" else path),
    "pieces": fg.Bucketing(bucket_bytes=1000),
}


@pytest.mark.parametrize("name", BUCKETINGS)
def test_the_sensitivity_is_what_the_opposite_gradient_of_a_worker_does(name):
    """Through `compressed_pmean`, and no further: so no part is forgotten, or counted twice."""
    rng, bucketing = np.random.default_rng(0), BUCKETINGS[name]
    rows = {n: rng.normal(size=(3, *s.shape)).astype("float32") for n, s in LIKE.items()}
    flipped = {
        n: leaf * np.float32([1, -1, 1]).reshape(3, *[1] * (leaf.ndim - 1))
        for n, leaf in rows.items()
    }
    for exchange in (privacy.TopVotes(3, k=25), privacy.TopVotes(3, fraction=0.1)):
        tx = fg.compressed_pmean(exchange, axis_name="data", bucketing=bucketing)
        mean = jax.jit(jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(g))[0], axis_name="data"))
        one, other = jax.device_get((mean(rows), mean(flipped)))
        moved = jax.tree.map(lambda a, b: 3 * (a[0] - b[0]), one, other)
        length = math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in moved.values()))
        assert length == pytest.approx(privacy.sensitivity(exchange, LIKE, bucketing=bucketing))
        noisy = dataclasses.replace(exchange, sigma=100.0)
        found = privacy.epsilon(noisy, LIKE, steps=10, delta=1e-5, bucketing=bucketing)
        assert found == pytest.approx(by_hand(length**2 / 4, 100.0, 10, 1e-5))
