"""GRACE: compressors, memories and communicators of one framework, run over gloo."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from others._both import (
    Row,
    apart,
    both_ways,
    described,
    draws,
    gradients,
    imported,
    local_key,
    of_magnitudes,
    pair,
    pmean,
    residual,
    run,
    starting,
    together,
)

import fftgrad as fg

REPOSITORY = "sands-lab/grace"
LICENSE = "BSD-2-Clause"
SHAPE, WORKERS, STEPS, KEPT, RANK = (40, 30), 3, 20, 0.05, 2
FEW = 10
"""Steps of PowerSGD: with feedback its rounding grows, and after 20 of them float32 and float64 of
the same program are 5e-5 apart."""


class Case(NamedTuple):
    """A compressor of GRACE and what fftgrad has.

    Attributes:
      parameters: for `grace_from_params`.
      tx: the transformation, and `ours` its name.
      centered: whether the gradients have mean zero.
      drawn: whether both get the same uniform numbers.
      factor: theirs over ours, by choice.
      kept: whether a residual is compared.
      differs: what differs by choice.
    """

    parameters: dict[str, Any]
    tx: Any
    ours: str
    centered: bool = False
    drawn: bool = False
    factor: float = 1.0
    kept: bool = False
    differs: str = ""


LEAF = fg.Bucketing("leaf")
CASES = {
    "topk": Case(
        {"compressor": "topk", "compress_ratio": KEPT, "memory": "residual"},
        pmean(fg.methods.top_k(KEPT)),
        "`top_k`",
        kept=True,
    ),
    "dgc": Case(
        {"compressor": "dgc", "compress_ratio": KEPT, "memory": "dgc", "momentum": 0.9},
        pmean(fg.methods.dgc(KEPT)),
        "`dgc`",
        kept=True,
        differs="its threshold is that of a sample, ours exact: it drew the k-th value; without "
        "its clipping, which fails",
    ),
    "signsgd": Case(
        {"compressor": "signsgd"}, fg.methods.scale_by_majority_vote(), "`scale_by_majority_vote`"
    ),
    "efsignsgd": Case(
        {"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 1.0},
        pmean(fg.methods.sign_sgd()),
        "`sign_sgd`",
        factor=WORKERS,
        kept=True,
        differs="the sum over the workers there, the mean here; its learning rate in the memory "
        "was 1: with another one its first step has another length",
    ),
    "onebit": Case(
        {"compressor": "onebit"},
        pmean(fg.AllGather(fg.codecs.BinMeans(1)), bucketing=LEAF),
        "`BinMeans(1)`",
        centered=True,
        differs="parts at zero there, at the mean here: gradients of mean zero; its mask is a byte "
        "there, whose negation is 254 or 255: it was made a Boolean",
    ),
    "qsgd": Case(
        {"compressor": "qsgd", "quantum_num": 7, "bucket_size": 128},
        pmean(fg.methods.qsgd(bits=4, bucket=128)),
        "`qsgd(4, 128)`",
        drawn=True,
        differs="7 levels; 16 bits or 8 a code there, 4 here",
    ),
    "terngrad": Case(
        {"compressor": "terngrad"},
        pmean(fg.methods.terngrad()),
        "`terngrad`",
        centered=True,
        drawn=True,
        differs="clips by the deviation from the mean there, from zero here: gradients of mean "
        "zero",
    ),
    "fp16": Case(
        {"compressor": "fp16"},
        pmean(fg.AllGather(fg.Cast("float16"))),
        '`Cast("float16")`',
    ),
}


def theirs(rank: int, checkout: pathlib.Path, given: dict[str, Any]) -> dict[str, Any]:
    """What each compressor makes of all steps on one worker, and its last residual."""
    helper = imported(checkout, "grace_dl.dist.helper")
    found: dict[str, Any] = {}
    for name, (parameters, rows, numbers) in given.items():
        method = helper.grace_from_params(
            {"memory": "none", "communicator": "allgather", "world_size": WORKERS} | parameters
        )
        if name == "dgc":
            method.compressor.tensors_size_are_same = True  # other sizes are gathered on a GPU only
        if name == "onebit":
            method.compressor.decompress = _with_mask(method.compressor.decompress)
        found[name] = stepped(method, rows[:, rank], numbers and numbers[rank])
    return found | {"powersgd": powered(checkout, given["topk"][1][:FEW, rank])}


def _with_mask(decompress: Any) -> Any:
    """The same of a mask that is Boolean."""
    return lambda sent, shape: decompress((sent[0].bool(), *sent[1:]), shape)


def stepped(method: Any, rows: np.ndarray, numbers: Any) -> tuple[np.ndarray, Any]:
    """The aggregates of all steps, and the residual."""
    import torch

    out: list[np.ndarray] = []
    compress = method.compressor.compress
    for step, row in enumerate(rows):
        uniform: Any = contextlib.nullcontext()
        if numbers is not None:
            fed = torch.from_numpy(of_magnitudes(numbers[step], row.ravel()))
            uniform = mock.patch.object(torch.Tensor, "uniform_", return_value=fed)
        elif hasattr(method.compressor, "compress_ratio") and hasattr(method.memory, "gradients"):
            method.compressor.compress = lambda tensor, name: _at_the_kth(compress, tensor, name)
        with uniform:
            out.append(method.step(torch.from_numpy(row.copy()), "w").numpy().copy())
    memory = getattr(method.memory, "gradients", getattr(method.memory, "residuals", {}))
    return np.stack(out), memory["w"].numpy().reshape(SHAPE) if memory else None


def _at_the_kth(compress: Any, tensor: Any, name: str) -> Any:
    """Compresses with a sample that is the k-th largest value, again and again."""
    import torch

    flat = tensor.flatten().abs()
    at = torch.topk(flat, int(flat.numel() * KEPT)).indices[-1]
    with mock.patch.object(torch.Tensor, "uniform_", lambda self, *_: self.fill_(at + 0.5)):
        return compress(tensor, name)


def powered(checkout: pathlib.Path, rows: np.ndarray) -> tuple[np.ndarray, Any]:
    """The same of PowerSGD, which the framework's helper makes for one worker."""
    import torch

    compressor = imported(checkout, "grace_dl.dist.compressor.powersgd").PowerSGDCompressor
    memory = imported(checkout, "grace_dl.dist.memory.residual").ResidualMemory()
    allreduce = imported(checkout, "grace_dl.dist.communicator.allreduce").Allreduce
    torch.manual_seed(0)  # the factor is drawn by each worker
    method = allreduce(compressor(RANK, use_memory=True, world_size=WORKERS), memory, WORKERS)
    return stepped(method, rows, None)


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """A row for each compressor that fftgrad has, and for its residual."""
    del smoke
    plain = gradients(SHAPE, workers=WORKERS, steps=STEPS)
    centered = plain - plain.mean((2, 3), keepdims=True)
    size = int(np.prod(SHAPE))
    numbers = [
        np.stack([draws(local_key(step, worker), size) for step in range(STEPS)])
        for worker in range(WORKERS)
    ]
    given = {
        name: (case.parameters, centered if case.centered else plain, case.drawn and numbers)
        for name, case in CASES.items()
    }
    given = {name: (p, rows, fed or None) for name, (p, rows, fed) in given.items()}
    (found,) = together(theirs, WORKERS, [(checkout, given)])
    words = described(SHAPE, WORKERS, STEPS)
    for name, case in CASES.items():
        updates, state = run(case.tx, given[name][1])
        inputs = words + (", our uniform numbers" if case.drawn else "")
        means = updates * case.factor, found[0][name][0].reshape(STEPS, *SHAPE)
        if case.kept:
            errors = residual(state), [worker[name][1] for worker in found]
            names = f"`{name}`", case.ours, "its residual"
            yield from pair(names, inputs, means, errors, differs=case.differs)
        else:
            mean = apart(*means)
            yield Row(f"`{name}`, the mean", case.ours, inputs, mean, differs=case.differs)

    import torch

    torch.manual_seed(0)
    factor = torch.empty(SHAPE[1], RANK).normal_().numpy()
    updates, state = run(pmean(fg.methods.power_sgd(RANK)), plain[:FEW], starting(factor))
    yield from pair(
        ("`powersgd`", "`power_sgd`", "its residual"),
        f"{described(SHAPE, WORKERS, FEW)}, rank {RANK}",
        (updates, found[0]["powersgd"][0]),
        (residual(state), [worker["powersgd"][1] for worker in found]),
        limit=1e-4,
        differs="with `use_memory`, the number of workers and a common seed, which its helper "
        "leaves out: it sums, and each worker draws a factor of its own",
    )

    x = plain[0, 0]
    sent = imported(checkout, "grace_dl.dist.compressor.randomk").RandomKCompressor(KEPT)
    back = sent.decompress(*sent.compress(torch.from_numpy(x), "w")).numpy()
    own = both_ways(fg.codecs.RandomK(KEPT), x)
    share = abs(np.count_nonzero(own) - np.count_nonzero(back)) / np.count_nonzero(own)
    yield Row(
        "`randomk`, how many values it sends",
        "`RandomK`",
        f"{SHAPE[0]} × {SHAPE[1]}, {KEPT:.0%}",
        float(share),
        "share of them",
        None,
        "draws with replacement there, one position of each interval here",
    )
