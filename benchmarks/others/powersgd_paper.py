"""The code of PowerSGD's paper: its low-rank reducer, and the top-k that it was compared with."""

import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from others._both import (
    Row,
    apart,
    described,
    gradients,
    imported,
    pair,
    pmean,
    residual,
    run,
    starting,
    together,
)

import fftgrad as fg

REPOSITORY = "epfml/powersgd"
LICENSE = "MIT"
CASES = [((64, 32), 1), ((48, 100), 2), ((8, 144), 2)]
TREE = {"a": (40, 30), "b": (200,)}
KEPT = 0.02


def theirs(
    rank: int, checkout: pathlib.Path, name: str, rows: list[np.ndarray], fields: dict[str, Any]
) -> Any:
    """The means of one worker by a reducer, and its last memory."""
    import torch
    import torch.distributed as dist

    module = imported(checkout / "paper-code", "gradient_reducers")
    reducer = object.__new__(getattr(module, name))  # `__init__` draws 128 million numbers
    own = {"device": "cpu", "n_workers": dist.get_world_size(), "timer": mock.MagicMock()}
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
    """Rows for each shape and rank, and for both top-k."""
    cases = CASES[: 1 if smoke else None]
    rng = np.random.default_rng(7)
    vectors = gradients((7,), seed=1)  # it fails without any
    given = [gradients(shape) for shape, _ in cases]
    queries = [rng.standard_normal((shape[1], rank), np.float32) for shape, rank in cases]
    state = {"p_memory": None, "q_memory": None, "reuse_query": True}
    whole: list[tuple[Any, ...]] = []
    for rows, query in zip(given, queries, strict=True):
        fields = state | {"rank": query.shape[1], "query": query}
        whole.append((checkout, "RankKReducer", [rows, vectors], fields))
    tree = {key: gradients(shape, seed=i) for i, (key, shape) in enumerate(TREE.items())}
    bucketings: dict[str, Any] = {"TopKReducer": "leaf", "GlobalTopKReducer": "model"}
    whole += [
        (checkout, name, list(tree.values()), {"compression": 2 * KEPT}) for name in bucketings
    ]
    runs = iter(together(theirs, 3, whole))

    for (shape, rank), rows, query in zip(cases, given, queries, strict=True):
        found, both = next(runs), {"b": vectors, "w": rows}
        updates, after = run(pmean(fg.methods.power_sgd(rank)), both, starting(query))
        yield from pair(
            ("`RankKReducer`", "`power_sgd`", "its memory"),
            f"{described(shape)}, rank {rank}",
            (updates["w"], found[0][0][0]),
            (residual(after)["w"], [kept[0] for _, kept in found]),
            limit=1e-4,
        )

    for name, scope in bucketings.items():
        found = next(runs)
        updates, after = run(pmean(fg.methods.top_k(KEPT), bucketing=fg.Bucketing(scope)), tree)
        means, inputs = found[0][0], "40 × 30 and 200 values, 3 workers, 20 steps, 2 %"
        worst = max(apart(updates[key], mean) for key, mean in zip(tree, means, strict=True))
        yield Row(f"`{name}`, the mean", f'`top_k`, `Bucketing("{scope}")`', inputs, worst)
        left = residual(after)
        memories = [np.stack([kept[i] for _, kept in found]) for i in range(len(tree))]
        worst = max(apart(left[key], memory) for key, memory in zip(tree, memories, strict=True))
        yield Row("its memory", "the residual", inputs, worst)
