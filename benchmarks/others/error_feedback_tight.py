"""The tight rates of error feedback: the authors' worst cases, computed and published by them."""

import dataclasses
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from others._compare import Row, imported, pmean, residual, run

import fftgrad as fg

REPOSITORY = "DanielBergThomsen/error-feedback-tight"
LICENSE = "MIT"
CURVATURES = (0.1, 0.25, 0.5)
"""The smallest ones; the largest is 1."""
EVERY = 10
PUBLISHED = "rhos_EF_simple.pkl"


@dataclasses.dataclass(frozen=True)
class Shares(fg.Quantizer):
    """Quantizer: of each value a share of its own; 1 - √ε or 1 + √ε loses ε of the energy."""

    shares: tuple[float, ...]

    def compress(self, x: jax.Array, state: Any, step: fg.Step) -> fg.Compressed:
        """All of it."""
        return fg.Compressed(fg.Payload(x * jnp.asarray(self.shares, jnp.float32)))

    def decompress(self, payload: fg.Payload, like: Any, step: fg.Step) -> jax.Array:
        """As it is."""
        return payload.main


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """A row for each curvature: what a step of fftgrad does at its worst, over their whole grid."""
    helpers = imported(checkout, "theory_helpers")
    for curvature in CURVATURES[: 1 if smoke else None]:
        published = pickle.loads((checkout / "data" / PUBLISHED).read_bytes())[curvature]
        # The grid of their experiments.
        sides = published.shape
        lost = np.linspace(0.01, 0.99, sides[1])[::EVERY]
        rates = np.linspace(0.01, 2 / (1 + CURVATURES[0]), sides[0])[::EVERY]
        lost, rates = (a.ravel() for a in np.meshgrid(lost, rates))
        worst = np.max(
            [
                contraction(helpers, h, np.sqrt(lost) * sign, lost, rates)
                for h in (curvature, 1.0)
                for sign in (-1, 1)
            ],
            axis=0,
        )
        expected = published[::EVERY, ::EVERY].ravel()
        yield Row(
            f"`{PUBLISHED}`, the contraction of `EF`",
            "`ErrorFeedback`, one step of SGD",
            f"curvatures {curvature} to 1, {expected.size} pairs of loss and rate",
            float(np.max(np.abs(worst - expected) / expected)),
            differs="of one coordinate, at the point that contracts least by their Lyapunov "
            "function",
        )


def contraction(
    helpers: Any, curvature: float, share: np.ndarray, lost: np.ndarray, rates: np.ndarray
) -> np.ndarray:
    """V after over V before, where it is largest, for each pair."""
    energy = np.stack([helpers.optimal_lyapunov(1 - e, "EF")[0] for e in lost])
    kept = 1 + share
    step = np.array([[1 - kept * rates * curvature, -kept], [-share * rates * curvature, -share]])
    step = np.moveaxis(step, -1, 0)
    after = np.swapaxes(step, 1, 2) @ energy @ step
    values, vectors = np.linalg.eig(np.linalg.solve(energy, after))
    largest = np.argmax(np.real(values), axis=1)
    x, e = np.take_along_axis(np.real(vectors), largest[:, None, None], axis=2)[..., 0].T
    x = x.astype(np.float32)

    start = np.stack([(e / rates).astype(np.float32)] * 2)[:, None]
    tx = pmean(fg.AllGather(Shares(tuple(kept.tolist()))), fg.ErrorFeedback())
    gradient = (curvature * x).astype(np.float32)
    mean, state = run(
        tx, np.stack([[gradient] * 2]), lambda s: optax.tree.set(s, residual=jnp.asarray(start))
    )
    moved = x - rates * mean[0]
    left = rates * residual(state)[0]

    def total(x: np.ndarray, e: np.ndarray) -> np.ndarray:
        both = np.stack([x, e], axis=-1)
        return np.einsum("ni,nij,nj->n", both, energy, both)

    return total(moved, left) / total(x.astype(np.float64), rates * start[0, 0].astype(np.float64))
