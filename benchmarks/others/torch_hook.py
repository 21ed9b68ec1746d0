"""PowerSGD as torch ships it, a hook of DistributedDataParallel."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from others._both import (
    Row,
    apart,
    described,
    each,
    gradients,
    pair,
    pmean,
    residual,
    run,
    starting,
)

import fftgrad as fg

REPOSITORY = "pytorch/pytorch"
LICENSE = "BSD-3-Clause"
VERSION = torch.__version__
DENSE = 2
"""Steps before the hook may compress."""
CASES = [((64, 32), 1), ((48, 100), 2), ((8, 16, 3, 3), 2), ((96, 96), 4)]


def theirs(rank: int, _: None, matrices: np.ndarray, columns: int, biases: np.ndarray) -> Any:
    """The means of all steps, and the last error, of one worker."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    class Product(torch.nn.Module):
        """A model whose gradients are what it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(matrices.shape[2:]))
            self.b = torch.nn.Parameter(torch.zeros(biases.shape[2:]))

        def forward(self, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (self.w * w).sum() + (self.b * b).sum()

    model = torch.nn.parallel.DistributedDataParallel(Product())
    state = hooks.PowerSGDState(None, columns, start_powerSGD_iter=DENSE)
    order: list[torch.Size] = []

    def hook(state: Any, bucket: Any) -> Any:
        order[:] = [gradient.shape for gradient in bucket.gradients()]
        return hooks.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))  # no types
    means: list[Any] = []
    for w, b in zip(matrices[:, rank], biases[:, rank], strict=True):
        model.zero_grad(set_to_none=False)
        model(torch.from_numpy(w), torch.from_numpy(b)).backward()
        means.append([p.grad.numpy().copy() for p in model.module.parameters()])
    sizes = [shape.numel() for shape in order]
    parts = np.split(state.error_dict[0].numpy(), np.cumsum(sizes)[:-1])
    return means, parts[order.index(model.module.w.shape)]


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for each shape and rank."""
    b = gradients((7,), steps=20 + DENSE, seed=1)
    cases = [(*case, b) for case in CASES[: 1 if smoke else None]]
    for (shape, rank, _), w, found in each(theirs, checkout, cases, steps=20 + DENSE):
        means = found[0][0][DENSE:]
        flat = w.reshape(*w.shape[:2], shape[0], -1)  # their matrix of a convolution
        torch.manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))  # as they do
        factor = torch.randn(1, flat.shape[-1], rank)[0].numpy()
        rows = {"w": flat[DENSE:], "b": b[DENSE:]}
        updates, state = run(pmean(fg.methods.power_sgd(rank)), rows, starting(factor))
        inputs = f"{described(shape)}, rank {rank}"
        yield from pair(
            ("`powerSGD_hook`", "`power_sgd`", "its error"),
            inputs,
            (updates["w"].reshape(20, *shape), [mean for mean, _ in means]),
            (residual(state)["w"].reshape(3, -1), [error for _, error in found]),
            limit=1e-4,
        )
        dense = apart(updates["b"], [mean for _, mean in means])
        yield Row("vectors, dense", "the same", inputs, dense)
