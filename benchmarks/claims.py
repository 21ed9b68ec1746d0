"""Claims of the FFT paper and of ScaleCom that take training.

The FFT paper: the more frequencies are dropped the worse the accuracy, from some theta on; a theta
that goes to zero where the learning rate falls trains as dense does, even after 0.99. As in the
paper the rate is constant and falls to a tenth once, after 130 of 180 epochs there and at the same
share of the steps here, and all thetas run at one rate.

ScaleCom: the residuals of the workers are alike, so that what one of them finds large is large in
the mean of all. After a run, with the next gradients added to the residuals as in a step: the mean
cosine between two workers, the share of a worker's k largest that are among the k largest of the
mean, and what is lost of the mean if one worker chooses, beside its own best choice.
"""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from _record import markdown as table
from methods import ROWS, Method, Setting, fed_back, gradients_of, watched
from program import Column, Point, Study
from tasks import Batch

import fftgrad as fg

CUT = 130 / 180
"""The share of the steps after which the rate falls to a tenth."""
CHUNK = 50
"""Values for each one that ScaleCom sends."""


def cut(peak: float, steps: int) -> Callable[[int], Any]:
    """A constant rate that falls to a tenth once."""
    return optax.piecewise_constant_schedule(peak, {round(CUT * steps): 0.1})


def theta(share: float) -> Method:
    """The FFT paper's method."""
    return Method(f"theta {share}", fg.methods.fft_sparsification(share))


def falling(share: float) -> Method:
    """The same, with nothing dropped where the rate has fallen."""

    def make(setting: Setting) -> fg.Recipe:
        end = {round(CUT * setting.steps): 0.0}
        return fg.methods.fft_sparsification(share, theta_schedule=end)

    return Method(f"theta {share}, then 0", make, phases=((CUT, (0,)),), later=(1,))


def scalecom(uptake: float) -> Method:
    """ScaleCom without the optimizer's momentum."""
    own = fg.methods.scalecom(CHUNK, uptake)
    return watched(fed_back(f"ScaleCom, uptake {uptake}", own))


class Similarity(Column):
    """Of what the workers of ScaleCom would choose from in the next step."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Cosines, overlap and losses."""
        if not self.program.method.name.startswith("ScaleCom"):
            return {}
        next_one, _ = self.program.step(end, batch, 0.0)
        residuals = gathered(optax.tree.get(end.state, "residual"))
        compensated = residuals + gathered(gradients_of(next_one.state))
        alike = {"residuals": cosine(residuals), "cosine": cosine(compensated)}
        return alike | chosen_by(compensated)


def gathered(tree: Any) -> np.ndarray:
    """A row for each worker."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def cosine(vectors: np.ndarray) -> float:
    """The mean of those of all pairs."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return float(np.mean([a @ b for a, b in itertools.combinations(unit, 2)]))


def chosen_by(vectors: np.ndarray) -> dict[str, float]:
    """Overlap of a worker's choice with that of the mean, and the energy of the mean each loses."""
    mean = vectors.mean(0)
    k = -(-mean.size // CHUNK)
    best = largest(mean, k)
    chosen = [largest(row, k) for row in vectors]

    def lost(support: np.ndarray) -> float:
        return float(1 - np.sum(mean[support] ** 2) / np.sum(mean**2))

    return {
        "overlap": float(np.mean([np.isin(own, best).mean() for own in chosen])),
        "lost": float(np.mean([lost(own) for own in chosen])),
        "least": lost(best),
    }


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """The positions of the k largest magnitudes."""
    return np.argpartition(np.abs(x), -k)[-k:]


def markdown(results: Any) -> str:
    """Both tables of the page, means over the seeds."""
    runs = results["runs"]
    tasks = dict.fromkeys(run["task"] for run in runs)

    def mean(task: str, name: str, key: str, digits: int, scale: float = 1.0) -> str:
        own = [run for run in runs if (run["task"], run["method"]) == (task, name)]
        seeds = [run[key] for run in own if key in run]
        return f"{scale * float(np.mean(seeds)):.{digits}f}" if seeds else ""

    losses, alike = list[list[str]](), list[list[str]]()
    for name in dict.fromkeys(run["method"] for run in runs):
        digits = mean("digits", name, "loss", 3), mean("digits", name, "accuracy", 1, 100)
        losses.append([name, *digits, mean("lm", name, "loss", 3)])
        for task in tasks if name.startswith("ScaleCom") else ():
            keys = ("residuals", "cosine", "overlap", "lost", "least")
            cells = [mean(task, name, key, 2) for key in keys]
            alike += [[f"{task}, {name.rsplit(maxsplit=1)[1]}", *cells]] if any(cells) else []
    first = ["trained with", "digits, loss", "accuracy, %", "lm, loss"]
    second = ["task, uptake", "cosine of residuals", "with the gradient", "overlap", "lost"]
    both = table(first, losses), table([*second, "at least"], alike)
    return "\n\n".join(both).replace("|  |", "| |")


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The tables."""
    del folder, name
    print(markdown(results))


STUDY = Study(
    folder="papers",
    file="training",
    rows=[
        ROWS["dense"],
        *map(theta, (0.5, 0.7, 0.85, 0.9, 0.99)),
        *map(falling, (0.9, 0.99)),
        *map(scalecom, (1.0, 0.1)),
    ],
    show=show,
    tasks=("digits", "lm"),
    schedule=cut,
    column=Similarity,
    smoke=("dense", "theta 0.5", "theta 0.9, then 0", "ScaleCom, uptake 1.0"),
)
