"""Dion by its authors: the simple optimizer, and the reference that picks a side."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from others._both import (
    Row,
    apart,
    described,
    gradients,
    imported,
    package,
    residual,
    run,
    starting,
)

import fftgrad as fg

REPOSITORY = "microsoft/dion"
LICENSE = "MIT"
DECAY = 0.95
CASES = [((32, 64), 4), ((64, 32), 4), ((100, 48), 8)]
"""Shapes of torch, (out, in), and ranks."""


def theirs(optimizer: Any, x: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The moves of all steps at a rate of one, and the momentum, with the workers' mean gradient.

    The momenta of the workers add up to one that only the mean gradient moves.
    """
    import torch

    moves: list[np.ndarray] = []
    for row in rows.mean(1):
        before = x.detach().clone()
        x.grad = torch.from_numpy(row)
        optimizer.step()
        moves.append((x.detach() - before).numpy())
    return np.stack(moves), optimizer.state[x]["momentum"].numpy()


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for each shape and rank."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiler would round otherwise, and take minutes
    import torch

    package(checkout, "dion")
    simple = imported(checkout, "dion.dion_simple").Dion
    reference = imported(checkout, "dion.dion_reference").Dion
    for (out, wide), rank in CASES[: 1 if smoke else None]:
        rows = gradients((out, wide))
        inputs = f"{described((out, wide))}, rank {rank}"

        def ours(rows: np.ndarray, factor: np.ndarray, rank: int = rank) -> Any:
            return run(fg.methods.scale_by_dion(rank, DECAY), rows, starting(factor))

        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.zeros(out, wide))
        optimizer = simple([x], lr=1.0, mu=DECAY, weight_decay=0.0, rank=rank)
        optimizer._init_opt_state_dion(x, optimizer.state[x])
        factor = optimizer.state[x]["Q"].numpy().copy()
        moves, momentum = theirs(optimizer, x, rows)
        updates, state = ours(rows, factor)
        yield Row(
            "`DionSimple`, the move",
            "`scale_by_dion`",
            inputs,
            apart(-updates * (out / wide), moves),
            limit=1e-4,
            differs="P belongs to `out` there; so it was given the weight as a kernel (in, out), "
            "and the scale √(out/in) undone",
        )
        kept = residual(state).mean(0)
        yield Row("its momentum", "the residuals' mean", inputs, apart(kept, momentum), limit=1e-4)

        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.zeros(out, wide))
        share = rank / min(out, wide)
        optimizer = reference(
            [x], lr=1.0, mu=DECAY, weight_decay=0.0, rank_fraction=share, qr_method="qr"
        )
        optimizer._init_opt_state_dion(x, optimizer.state[x], share, 1)
        factor = optimizer.state[x]["Q"].numpy().copy()
        moves, momentum = theirs(optimizer, x, rows)
        if wide > out:
            updates, state = ours(np.swapaxes(rows, 2, 3), factor)
            found = -np.swapaxes(updates, 1, 2)
            differs = ""
        else:
            updates, state = ours(rows, factor)
            found = -updates * (out / wide)
            differs = "the factor of the longer side is orthonormal there, `in`'s here; as above"
        yield Row(
            "`DionReference`, the move",
            "`scale_by_dion`",
            inputs,
            apart(found, moves),
            limit=1e-4,
            differs=differs,
        )
