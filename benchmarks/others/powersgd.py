"""PowerSGD's authors' package, which sends one factor a step, in turns, as ACP-SGD does."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
from others._both import Row, apart, described, gradients, imported, pmean, residual, run, together

import fftgrad as fg

REPOSITORY = "epfml/powersgd"
LICENSE = "MIT"
CASES = [((64, 32), 1), ((48, 100), 2), ((8, 144), 2)]


def theirs(rank: int, checkout: pathlib.Path, rows: np.ndarray, columns: int) -> Any:
    """The means of one worker, its last error, and the factors at the start."""
    import torch

    module = imported(checkout, "powersgd.powersgd")
    config = module.BasicConfig(rank=columns)
    method = module.BasicPowerSGD([torch.zeros(rows.shape[2:])], config)
    start = [factors[0][0].numpy().copy() for factors in (method._ps, method._qs)]
    error, means = torch.zeros(rows.shape[2:]), list[np.ndarray]()
    for row in rows[:, rank]:
        (mean,) = method.aggregate([error.add_(torch.from_numpy(row))])  # leaves the error there
        means.append(mean.numpy().copy())
    return np.stack(means), error.numpy(), start


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for each shape and rank."""
    cases = CASES[: 1 if smoke else None]
    given = [gradients(shape) for shape, _ in cases]
    whole = [(checkout, rows, rank) for rows, (_, rank) in zip(given, cases, strict=True)]
    runs = together(theirs, 3, whole)
    for (shape, rank), rows, found in zip(cases, given, runs, strict=True):
        means, _, (p, q) = found[0]
        # They send Q first, which for one matrix is P of its transpose.
        factors = {name: [np.stack([f] * 3)] for name, f in (("first", q), ("second", p))}
        tx = pmean(fg.methods.acp_sgd(rank))
        turned = np.swapaxes(rows, 2, 3)
        updates, state = run(tx, turned, lambda s, f=factors: optax.tree.set(s, **f))
        inputs = f"{described(shape)}, rank {rank}"
        yield Row(
            "`BasicPowerSGD`, the mean",
            "`acp_sgd`",
            inputs,
            apart(np.swapaxes(updates, 1, 2), means),
            limit=1e-4,
            differs="they send Q first, ours P: it was given the transpose",
        )
        errors = np.stack([error for _, error, _ in found])
        error = apart(np.swapaxes(residual(state), 1, 2), errors)
        yield Row("its error", "the residual", inputs, error, limit=1e-4)
