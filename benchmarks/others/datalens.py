"""DataLens by its authors: votes on the largest values, and what they cost in privacy."""

import pathlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
from others._both import Row, apart, described, gradients, imported, run

import fftgrad as fg

REPOSITORY = "AI-secure/DataLens"
LICENSE = "none"
WORKERS, SHAPE, KEPT, STEPS = 10, (30, 20), 60, 5
QUIET = 1e-3
"""Noise that moves no sum of votes over the threshold, because theirs takes none that is zero."""


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for the aggregate and for its Rényi privacy."""
    del smoke
    import torch

    module = imported(checkout, "rdp_utils")
    rows = gradients(SHAPE, workers=WORKERS, steps=STEPS)
    orders, words = np.arange(2, 64), described(SHAPE, WORKERS, STEPS)
    for beta in (0.15, 0.35):
        with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
            found = [
                module.signsgd_aggregate(list(row), QUIET, orders, KEPT, beta=beta, alpha=1.0)[0]
                for row in rows
            ]
        tx = fg.contrib.votes.scale_by_datalens(
            fg.contrib.votes.TopVotes(WORKERS, k=KEPT), beta=beta
        )
        updates, _ = run(tx, rows)
        yield Row(
            "`signsgd_aggregate`",
            "`scale_by_datalens`",
            f"{words}, {KEPT} votes, threshold {beta}",
            apart(updates, np.stack(found)),
            differs="its noise of 0.001 moves no vote; without its `.cuda()`",
        )
    sigma = 25.0
    theirs = module.rdp_data_independent_gaussian(sigma / (2 * KEPT) ** 0.5, orders)
    votes = fg.contrib.votes.TopVotes(WORKERS, k=KEPT, sigma=sigma)
    like = np.zeros(SHAPE, np.float32)
    noise = sigma / fg.contrib.votes.sensitivity(votes, like)
    ours = [float(order) / (2 * noise**2) for order in orders]
    yield Row(
        "`rdp_data_independent_gaussian`, as it is called there",
        "`votes.sensitivity`",
        f"orders 2 to 63, {KEPT} votes, noise of {sigma:g}",
        apart(ours, theirs),
        differs="the bound that depends on the votes is not taken here",
    )
