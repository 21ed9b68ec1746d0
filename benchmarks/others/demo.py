"""DeMo by its authors."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
from others._both import Row, apart, described, each, imported, pmean, residual, run

import fftgrad as fg

REPOSITORY = "bloc97/DeMo"
LICENSE = "none"
CASES = [((128, 192), 32, 64), ((64, 320), 8, 64), ((64, 96), 16, 32), ((256,), 8, 64)]
"""Shapes, coefficients of a tile, and the side of a tile, which divides them."""
DECAY = 0.99


def theirs(rank: int, checkout: pathlib.Path, rows: np.ndarray, k: int, block: int) -> Any:
    """The signs of all steps, and the momentum, of one worker."""
    import torch

    module = imported(checkout, "demo")
    w = torch.nn.Parameter(torch.zeros(rows.shape[2:]))
    optimizer = module.DeMo(
        [w], lr=1.0, compression_decay=DECAY, compression_topk=k, compression_chunk=block
    )
    signs: list[np.ndarray] = []
    for row in rows[:, rank]:
        w.grad = torch.from_numpy(row)
        optimizer.step()
        signs.append(w.grad.numpy().copy())
    return np.stack(signs), optimizer.demo_state[w]["delta"].numpy()


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for each shape: one worker, where the signs are comparable, and three."""
    cases = CASES[: 1 if smoke else None]
    for workers in (1, 3):
        for (shape, k, block), rows, found in each(theirs, checkout, cases, workers):
            tx = optax.chain(pmean(fg.methods.demo(k, block, DECAY)), optax.scale_by_sign())
            updates, state = run(tx, rows)
            kept = residual(state)
            inputs = f"{described(shape, workers)}, {k} of a tile of side {block}"
            momenta = apart(kept, np.stack([momentum for _, momentum in found]))
            yield Row("`DeMo`, the momenta", "`demo`, the residuals", inputs, momenta)
            share = float(np.mean(updates != found[0][0]))
            alone = workers == 1
            yield Row(
                "its signs",
                "the updates",
                inputs,
                share,
                "share of the values",
                # A sum of cosines that is zero but for rounding has a sign on both sides.
                1e-4 if alone else None,
                "" if alone else "the mean is over who sent a coefficient there, over all here",
            )
