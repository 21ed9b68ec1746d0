"""ACP-SGD by its authors."""

import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import optax
from others._both import Row, apart, described, gradients, imported, pmean, residual, run, together

import fftgrad as fg

REPOSITORY = "lzhangbv/acpsgd"
LICENSE = "none in the repository; Apache-2.0 in its files"
CASES = [((64, 32), 1), ((48, 100), 2), ((96, 96), 4)]


def theirs(rank: int, checkout: pathlib.Path, rows: np.ndarray, columns: int) -> Any:
    """The means of one worker, its last error, and the factors at the start."""
    import torch

    module = imported(checkout, "acpsgd")
    torch.cuda.stream = torch.cuda.current_stream = mock.MagicMock()  # there is one order only
    torch.manual_seed(0)
    w: Any = torch.nn.Parameter(torch.zeros(rows.shape[2:]))
    optimizer = module.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], rank=columns)
    optimizer._streams["reduce"] = mock.MagicMock()
    start = [f["w"].numpy().copy() for f in (optimizer._param_ps, optimizer._param_qs)]
    means: list[np.ndarray] = []
    for row in rows[:, rank]:
        optimizer.zero_grad(set_to_none=False)
        (w * torch.from_numpy(row)).sum().backward()
        optimizer.step()
        means.append(w.grad.numpy().copy())
    return np.stack(means), optimizer._param_errors["w"].numpy(), start


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for each shape and rank."""
    cases = CASES[: 1 if smoke else None]
    given = [gradients(shape) for shape, _ in cases]
    whole = [(checkout, rows, rank) for rows, (_, rank) in zip(given, cases, strict=True)]
    runs = together(theirs, 3, whole)
    for (shape, rank), rows, found in zip(cases, given, runs, strict=True):
        means, _, (p, q) = found[0]
        factors = {name: [np.stack([f] * 3)] for name, f in (("first", p), ("second", q))}
        tx = pmean(fg.methods.acp_sgd(rank))
        updates, state = run(tx, rows, lambda s, f=factors: optax.tree.set(s, **f))
        errors = np.stack([error for _, error, _ in found])
        inputs = f"{described(shape)}, rank {rank}"
        differs = "its CUDA streams were left out"
        yield Row(
            "`DistributedOptimizer`, the mean",
            "`acp_sgd`",
            inputs,
            apart(updates, means),
            limit=1e-4,
            differs=differs,
        )
        error = apart(residual(state), errors)
        yield Row("its error", "the residual", inputs, error, limit=1e-4)
