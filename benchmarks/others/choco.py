"""CHOCO-SGD by its authors: the code for convex problems, in NumPy."""

import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from others._both import AXIS, Row, apart, both_ways, draws, imported, of_magnitudes

import fftgrad as fg
from fftgrad.contrib import gossip

REPOSITORY = "epfml/ChocoSGD"
LICENSE = "Apache-2.0"
SAMPLES, FEATURES, RATE, REGULARIZER = 270, 40, 0.1, 1e-2
WORKERS = 9
CASES: list[tuple[str, np.ndarray, dict[str, Any], float]] = [
    ("ring", gossip.ring(WORKERS), {"quantization": "full"}, 1.0),
    ("ring", gossip.ring(WORKERS), {"quantization": "top", "coordinates_to_keep": 8}, 0.3),
    ("torus", gossip.torus(3, 3), {"quantization": "top", "coordinates_to_keep": 4}, 0.2),
]


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels of a logistic regression, sorted by label, so that the workers differ."""
    rng = np.random.default_rng(11)
    a = rng.standard_normal((SAMPLES, FEATURES))
    y = np.sign(a @ rng.standard_normal(FEATURES) + rng.standard_normal(SAMPLES))
    order = np.argsort(y, kind="stable")
    return a[order], y[order]


def theirs(checkout: pathlib.Path, topology: str, gamma: float, **quantization: Any) -> np.ndarray:
    """The parameters after each step, [steps, workers, features]."""
    folder = checkout / "convex_code"
    parameters = imported(folder, "parameters").Parameters
    logistic = imported(folder, "logistic").LogisticDecentralizedSGD

    class Recorded(logistic):  # pyright: ignore
        """Keeps the parameters of each step."""

        def update_estimate(self, t: int) -> None:
            super().update_estimate(t)
            self.found.append(self.x.T.copy())

    model: Any = Recorded(
        parameters(
            num_epoch=1,
            name="CHOCO",
            lr_type="constant",
            initial_lr=RATE,
            regularizer=REGULARIZER,
            estimate="final",
            n_cores=WORKERS,
            topology=topology,
            method="choco",
            consensus_lr=gamma,
            distribute_data=True,
            split_data_strategy="naive",
            split_data_random_seed=0,
            random_seed=0,
            **quantization,
        )
    )
    model.found = []
    model.x = np.zeros((FEATURES, WORKERS))
    model.x_hat, model.x_estimate = model.x.copy(), model.x.copy()
    model.fit(*data())
    return np.stack(model.found)


def ours(tx: optax.GradientTransformation) -> np.ndarray:
    """The parameters before each gossip, with the gradients there and the samples of theirs."""
    a, y = (jnp.asarray(v, jnp.float32) for v in data())
    each = SAMPLES // WORKERS
    chosen = np.random.RandomState(0)

    def step(x: Any, half: Any, state: Any, a: Any, y: Any) -> tuple[Any, Any, Any]:
        gradient = -y * a * jax.nn.sigmoid(-y * (a @ half)) + REGULARIZER * half
        moves, state = tx.update(gradient, state, x)
        return x + moves, x - RATE * gradient, state

    run = jax.jit(jax.vmap(step, axis_name=AXIS))
    x = half = jnp.zeros((WORKERS, FEATURES))
    state, found = jax.vmap(tx.init)(x), list[np.ndarray]()
    for _ in range(each):
        at = [chosen.choice(np.arange(w * each, (w + 1) * each)) for w in range(WORKERS)]
        x, half, state = run(x, half, state, a[np.array(at)], y[np.array(at)])
        found.append(np.asarray(half))
    return np.stack(found)


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """A row for each graph and codec."""
    for topology, weights, quantization, gamma in CASES[: 1 if smoke else None]:
        kept = quantization.get("coordinates_to_keep")
        codec = fg.TopK(k=kept) if kept else fg.codecs.Identity()
        tx = gossip.choco_sgd(optax.sgd(RATE), codec, weights, gamma=gamma)
        found = theirs(checkout, topology, gamma, **quantization)
        sent = f"the {kept} largest of {FEATURES} values" if kept else "all values"
        yield Row(
            f"`LogisticDecentralizedSGD`, {topology}",
            f"`choco_sgd`, `gossip.{topology}`",
            f"logistic regression, {WORKERS} workers, {len(found)} steps, {sent}",
            apart(ours(tx), found),
            differs="gossip comes before the gradient of the next step here, and after it there: "
            "ours was given gradients where theirs takes them",
        )

    quantize = imported(checkout / "convex_code", "logistic").qsgd_quantize
    key = jax.random.key(3)
    x = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    uniform = of_magnitudes(draws(key, x.size), x)
    with mock.patch.object(np.random, "rand", return_value=uniform):
        expected = quantize(x.astype(np.float64), 7, False)
    found = both_ways(fg.UniformQuantizer(bits=4, bucket=x.size), x, fg.Step(0, key, key))
    yield Row(
        "`qsgd_quantize`, unbiased",
        "`UniformQuantizer(4)`",
        f"{x.size} normal values in one bucket, 7 levels, our uniform numbers",
        apart(found, expected),
    )
