"""BEER and CHOCO-SGD as the authors of BEER run them: gossip between processes."""

import pathlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from others._both import AXIS, Row, apart, imported, package, together

import fftgrad as fg
from fftgrad.contrib import gossip

REPOSITORY = "liboyue/beer"
LICENSE = "none"
WORKERS, VALUES, STEPS, RATE, GAMMA = 4, 40, 30, 0.05, 0.4


def problem() -> tuple[np.ndarray, np.ndarray]:
    """H [w, n, n] and c [w, n] of the loss x'Hx / 2 - c'x of each worker, float64."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((WORKERS, 2 * VALUES, VALUES))
    h = np.einsum("wri,wrj->wij", rows, rows) / (2 * VALUES)
    return h, rng.standard_normal((WORKERS, VALUES))


def largest(x: Any, kept: int) -> Any:
    """The largest values of a tensor; zeros elsewhere."""
    import torch

    at = torch.topk(x.abs(), kept).indices
    return torch.zeros_like(x).scatter_(0, at, x[at])


def theirs(rank: int, checkout: pathlib.Path, name: str, kept: int | None) -> np.ndarray:
    """The parameters of one worker after each step."""
    import torch

    class Quadratic(torch.nn.Module):
        """The loss of this worker."""

        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(VALUES))

        def forward(self, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return self.x @ h @ self.x / 2 - c @ self.x

    torch.set_default_dtype(torch.float64)
    quiet = types.SimpleNamespace(info=_nothing, debug=_nothing)
    package(checkout, "beer", log=quiet)  # its own imports torchvision
    optimizers = imported(checkout, "beer.optim")
    imported(checkout, "beer.optim.compressor").largest = largest
    graph = imported(checkout, "beer.communication_graph").CommunicationGraph
    model = imported(checkout, "beer.data_parallel").DataParallel(Quadratic(), True)
    optimizer = getattr(optimizers, name)(
        model,
        gamma=GAMMA,
        lr=RATE,
        G=graph(WORKERS, rank, "cycle"),
        world_size=WORKERS,
        rank=rank,
        compression_type="identity" if kept is None else "largest",
        compression_params=[kept],
    )
    h, c = (torch.from_numpy(a[rank]) for a in problem())
    found: list[np.ndarray] = []
    for step in range(STEPS):
        model.zero_grad()
        model.module(h, c).backward()
        model.ref_module(h, c).backward()
        if not step:  # there is no gradient before the first one
            model.ref_module.x.grad.zero_()
        optimizer.step()
        found.append(model.flat_parameters.numpy().copy())
    return np.stack(found)


def _nothing(*args: Any) -> None:
    """In place of a log."""


def ours(tx: Any) -> np.ndarray:
    """The parameters of all workers after each step, [steps, workers, values]."""
    h, c = (jnp.asarray(a, jnp.float32) for a in problem())

    def step(x: jax.Array, state: Any, h: jax.Array, c: jax.Array) -> tuple[jax.Array, Any]:
        moves, state = tx.update(jnp.matmul(h, x, precision="highest") - c, state, x)
        return x + moves, state

    run = jax.jit(jax.vmap(step, axis_name=AXIS))
    x = jnp.zeros((WORKERS, VALUES))
    state, found = jax.vmap(tx.init)(x), list[np.ndarray]()
    for _ in range(STEPS):
        x, state = run(x, state, h, c)
        found.append(np.asarray(x))
    return np.stack(found)


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for both methods, without loss and with the largest values."""
    methods = {"BEER": gossip.beer, "CHOCO_SGD": gossip.choco_sgd}
    starts = {"BEER": "their program starts by `init`, which tells nobody of V; here by `step`"}
    sizes = (10,) if smoke else (None, 10)
    cases = [(checkout, name, kept) for kept in sizes for name in methods]
    runs = iter(together(theirs, WORKERS, cases))
    for kept in sizes:
        codec = fg.codecs.Identity() if kept is None else fg.TopK(k=kept)
        for name, method in methods.items():
            tx = method(optax.sgd(RATE), codec, gossip.ring(WORKERS), gamma=GAMMA)
            found = np.stack(next(runs), axis=1)
            sent = "all values" if kept is None else f"the {kept} largest of {VALUES} values"
            differs = [starts[name]] if name in starts else []
            differs += ["its `top` uses a name that is not defined: ours"] if kept else []
            yield Row(
                f"`{name}`, the parameters",
                f"`{method.__name__}`",
                f"a ring of {WORKERS} quadratics, {STEPS} steps, {sent}",
                apart(ours(tx), found),
                differs="; ".join(differs),
            )
