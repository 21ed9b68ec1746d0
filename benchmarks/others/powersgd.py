"""PowerSGD and ACP-SGD by PowerSGD's authors: the package, and the code of the paper."""

import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import optax
from others._compare import (
    Row,
    apart,
    described,
    gradients,
    imported,
    pmean,
    residual,
    run,
    together,
)

import fftgrad as fg

REPOSITORY = "epfml/powersgd"
LICENSE = "MIT"
CASES = [((64, 32), 1), ((48, 100), 2), ((8, 16, 3, 3), 2)]
TREE = {"a": (40, 30), "b": (200,)}
KEPT = 0.02


def alternating(rank: int, checkout: pathlib.Path, rows: np.ndarray, columns: int) -> Any:
    """The means of one worker by the package, its last error, and the factors at the start."""
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


def reduced(
    rank: int, checkout: pathlib.Path, name: str, rows: list[np.ndarray], fields: dict[str, Any]
) -> Any:
    """The means of one worker by a reducer of the paper's code, and its last memory."""
    import torch
    import torch.distributed as dist

    module = imported(checkout / "paper-code", "gradient_reducers")
    reducer = object.__new__(getattr(module, name))  # `__init__` draws 128 million numbers
    own = {
        "device": "cpu",
        "n_workers": dist.get_world_size(),
        "rank": rank,
        "timer": mock.MagicMock(),
    }
    vars(reducer).update(own | fields)
    if "query" in fields:
        query = torch.from_numpy(fields["query"])
        reducer.set_random = lambda vector: vector.copy_(query)
    memory = [torch.zeros(row.shape[2:]) for row in rows]
    means: list[list[np.ndarray]] = []
    for step in range(len(rows[0])):
        given = [torch.from_numpy(row[step, rank]) + m for row, m in zip(rows, memory, strict=True)]
        out = [torch.zeros_like(g) for g in given]
        reducer.reduce(given, out, memory)
        means.append([o.numpy().copy() for o in out])
    stacked = [np.stack(leaf) for leaf in zip(*means, strict=True)]
    return stacked, [m.numpy() for m in memory]


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for each shape and rank, and for the two top-k of the paper's code."""
    for shape, rank in CASES[: 1 if smoke else None]:
        rows = gradients(shape)
        flat = rows.reshape(*rows.shape[:2], shape[0], -1)  # their matrix of a convolution
        inputs = f"{described(shape)}, rank {rank}"
        found = together(alternating, 3, checkout, flat, rank)
        means, (p, q) = found[0][0], found[0][2]
        # They send Q first, which for one matrix is P of its transpose.
        tx = pmean(fg.methods.acp_sgd(rank))
        factors = {name: [np.stack([f] * 3)] for name, f in (("first", q), ("second", p))}
        updates, state = run(
            tx, np.swapaxes(flat, 2, 3), lambda s, f=factors: optax.tree.set(s, **f)
        )
        kept = residual(state)
        errors = np.stack([error for _, error, _ in found])
        differs = "they send Q first; so the transpose was given"
        mean = apart(np.swapaxes(updates, 1, 2), means)
        yield Row(
            "`BasicPowerSGD`, the mean", "`acp_sgd`", inputs, mean, limit=1e-4, differs=differs
        )
        error = apart(np.swapaxes(kept, 1, 2), errors)
        yield Row("its error", "the residual", inputs, error, limit=1e-4)

        query = np.random.default_rng(7).standard_normal((flat.shape[-1], rank), np.float32)
        fields = {"p_memory": None, "q_memory": None, "reuse_query": True, "rank": rank}
        found = together(reduced, 3, checkout, "RankKReducer", [flat], fields | {"query": query})
        tx = pmean(fg.methods.power_sgd(rank))
        start = np.stack([query] * 3)
        updates, state = run(tx, flat, lambda s, q=start: optax.tree.set(s, factors=[q]))
        kept = residual(state)
        mean = apart(updates, found[0][0][0])
        yield Row("`RankKReducer`, the mean", "`power_sgd`", inputs, mean, limit=1e-4)
        error = apart(kept, np.stack([memory[0] for _, memory in found]))
        yield Row("its memory", "the residual", inputs, error, limit=1e-4)

    for name, scope in (("TopKReducer", "leaf"), ("GlobalTopKReducer", "model")):
        tree = {key: gradients(shape, seed=i) for i, (key, shape) in enumerate(TREE.items())}
        found = together(reduced, 3, checkout, name, list(tree.values()), {"compression": 2 * KEPT})
        recipe = fg.methods.top_k(KEPT)
        tx = pmean(recipe, layout=fg.Layout(scope))
        updates, state = run(tx, tree)
        kept = residual(state)
        means, inputs = found[0][0], "40 × 30 and 200 values, 3 workers, 20 steps, 2 %"
        worst = max(apart(updates[key], mean) for key, mean in zip(tree, means, strict=True))
        yield Row(f"`{name}`, the mean", f'`top_k`, `Layout("{scope}")`', inputs, worst)
        memories = [np.stack([memory[i] for _, memory in found]) for i in range(len(tree))]
        worst = max(apart(kept[key], memory) for key, memory in zip(tree, memories, strict=True))
        yield Row("its memory", "the residual", inputs, worst)
