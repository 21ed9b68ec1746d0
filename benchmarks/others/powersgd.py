"""PowerSGD's authors' package, which sends one factor a step, in turns, as ACP-SGD does."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from others._both import Row, described, each, imported, pair, pmean, residual, run, starting

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
    for (shape, rank), rows, found in each(theirs, checkout, CASES[: 1 if smoke else None]):
        means, _, (p, q) = found[0]
        # They send Q first, which for one matrix is P of its transpose.
        tx, turned = pmean(fg.methods.acp_sgd(rank)), np.swapaxes(rows, 2, 3)
        updates, state = run(tx, turned, starting(first=q, second=p))
        yield from pair(
            ("`BasicPowerSGD`", "`acp_sgd`", "its error"),
            f"{described(shape)}, rank {rank}",
            (np.swapaxes(updates, 1, 2), means),
            (np.swapaxes(residual(state), 1, 2), [error for _, error, _ in found]),
            limit=1e-4,
            differs="they send Q first, ours P: it was given the transpose",
        )
