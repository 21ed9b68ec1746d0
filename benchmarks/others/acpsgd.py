"""ACP-SGD by its authors."""

import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from others._both import Row, described, each, imported, pair, pmean, residual, run, starting

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
    for (shape, rank), rows, found in each(theirs, checkout, CASES[: 1 if smoke else None]):
        means, _, (p, q) = found[0]
        updates, state = run(pmean(fg.methods.acp_sgd(rank)), rows, starting(first=p, second=q))
        yield from pair(
            ("`DistributedOptimizer`", "`acp_sgd`", "its error"),
            f"{described(shape)}, rank {rank}",
            (updates, means),
            (residual(state), [error for _, error, _ in found]),
            limit=1e-4,
            differs="its CUDA streams were left out",
        )
