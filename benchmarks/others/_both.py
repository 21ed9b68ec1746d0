"""What comparisons with the code of others share: inputs, fftgrad's workers, theirs, and rows."""

import functools
import importlib
import os
import pathlib
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fftgrad as fg

AXIS = "data"
Tree = Any
pmean = functools.partial(fg.compressed_pmean, axis_name=AXIS)


class Row(NamedTuple):
    """One comparison.

    Attributes:
      theirs: what of their code.
      ours: what of fftgrad.
      inputs: on what.
      difference: the largest, in the unit.
      unit: "relative", to the largest magnitude of theirs; else what is counted.
      limit: up to where they agree; None where what differs is a choice.
      differs: what differs by choice, or was done so that nothing does.
    """

    theirs: str
    ours: str
    inputs: str
    difference: float
    unit: str = "relative"
    limit: float | None = 1e-5
    differs: str = ""

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.difference == 0:
            return "equal"
        if self.limit is None:
            return "by choice"
        return "agrees" if self.difference <= self.limit else "**differs**"


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest magnitude of theirs."""
    a, b = (np.asarray(values, np.float64) for values in (ours, theirs))
    if a.shape != b.shape:
        raise ValueError(f"shapes must be equal, got {a.shape} and {b.shape}")
    return float(np.abs(a - b).max() / np.abs(b).max())


# Inputs


def gradients(
    shape: tuple[int, ...], *, workers: int = 3, steps: int = 20, seed: int = 0
) -> np.ndarray:
    """float32[steps, workers, *shape]; a part is the same throughout, one is the worker's own."""
    rng = np.random.default_rng(seed)
    common, own = rng.standard_normal(shape), rng.standard_normal((workers, *shape))
    new = rng.standard_normal((steps, workers, *shape))
    return (common + 0.5 * own + new).astype(np.float32)


def described(shape: tuple[int, ...], workers: int = 3, steps: int = 20) -> str:
    """Such inputs in words."""
    many = f"{workers} workers" if workers > 1 else "1 worker"
    return f"{' × '.join(map(str, shape))}, {many}, {steps} steps"


# fftgrad


def run(tx: Any, rows: Tree, edit: Callable[[Any], Any] = lambda state: state) -> tuple[Tree, Any]:
    """The updates of all steps, the same bits on all workers, and the last state of the workers.

    Args:
      tx: the transformation.
      rows: gradients, a tree of arrays [steps, workers, ...].
      edit: what becomes of the first state, so that both sides start alike.
    """
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    (length,) = {len(leaf) for leaf in jax.tree.leaves(rows)}
    steps = [jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), rows) for i in range(length)]
    state, out = edit(jax.vmap(tx.init)(steps[0])), list[Tree]()
    for row in steps:
        updates, state = update(row, state)
        out.append(jax.tree.map(np.asarray, updates))
    found: Tree = jax.tree.map(lambda *leaves: np.stack(leaves), *out)
    for leaf in jax.tree.leaves(found):
        assert (leaf == leaf[:, :1]).all(), "workers must have the same bits"
    return jax.tree.map(lambda leaf: leaf[:, 0], found), state


def starting(*factors: np.ndarray, **fields: np.ndarray) -> Callable[[Any], Any]:
    """What makes all workers start from these factors, or fields of what the exchange shares."""

    def edit(state: Any) -> Any:
        pmean = getattr(state, "pmean", state)
        (bucket,) = pmean.exchange
        many = len(jax.tree.leaves(bucket.shared)[0])
        new = {name: [np.stack([factor] * many)] for name, factor in fields.items()}
        shared = [np.stack([factor] * many) for factor in factors]
        shared = bucket.shared._replace(**new) if fields else shared
        pmean = pmean._replace(exchange=(bucket._replace(shared=shared),))
        return pmean if pmean.__class__ is state.__class__ else state._replace(pmean=pmean)

    return edit


def both_ways(codec: fg.codecs.Codec, x: np.ndarray, step: fg.Step | None = None) -> np.ndarray:
    """What comes of a vector that a codec sends."""
    like, step = jnp.asarray(x), step or fg.Step.of(0)
    message = fg.compress(codec, like, step=step)
    return np.asarray(fg.decompress(codec, message, like, step=step))


def pair(
    names: tuple[str, str, str],
    inputs: str,
    means: tuple[Any, Any],
    errors: tuple[Any, Any],
    limit: float = 1e-5,
    differs: str = "",
) -> Iterator[Row]:
    """Two rows: the means, and what is left, each of ours and of theirs.

    The names are those of their method, of ours, and of what they call the residual.
    """
    theirs, ours, left = names
    mean, error = apart(*means), apart(*errors)
    yield Row(f"{theirs}, the mean", ours, inputs, mean, limit=limit, differs=differs)
    yield Row(left, "the residual", inputs, error, limit=limit)


def residual(state: Any) -> Tree:
    """What the workers have not sent yet, a tree of arrays [workers, ...]."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], optax.tree.get(state, "residual"))


def draws(key: jax.Array, values: int) -> np.ndarray:
    """The uniform numbers that a codec draws for so many values with this local key, float32.

    They are found by halving: the ternary codec sends v/s of a value v as one where its number is
    below v/s. They are multiples of 2^-24, so 24 halvings find them.
    """
    below = _below(values)
    low, width = np.zeros(values, np.float32), np.float32(1.0)
    for _ in range(24):
        width /= 2
        low = np.where(np.asarray(below(jnp.asarray(low + width), key)), low, low + width)
    return low.astype(np.float32)


@functools.cache
def _below(values: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Whether the numbers that this key draws are below these points, compiled once."""
    codec = fg.UniformQuantizer(bits=2, bucket=values + 1, norm="max")

    @jax.jit
    def below(points: jax.Array, key: jax.Array) -> jax.Array:
        step, x = fg.Step(0, key, key), jnp.concatenate([points, jnp.ones(1)])  # 1 is the scale
        return fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)[:-1] > 0.5

    return below


def of_magnitudes(uniform: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The numbers by which |x| is rounded up where ours round x: -x goes up where x goes down."""
    return np.where(x < 0, 1 - uniform, uniform).astype(np.float32)


def local_key(step: int, worker: int, key: int = 0) -> jax.Array:
    """The local key of the first part in a step of `compressed_pmean(key=key)`."""
    local = jax.random.split(jax.random.fold_in(jax.random.key(key), step))[1]
    return jax.random.fold_in(jax.random.fold_in(local, worker), 0)


# Theirs


def imported(folder: pathlib.Path, name: str) -> Any:
    """A module of a checkout."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def package(folder: pathlib.Path, name: str, **stand_ins: Any) -> Any:
    """A package of a checkout without what its `__init__` imports, which may need a GPU."""
    module: Any = types.ModuleType(name)
    module.__path__ = [str(folder / name)]
    for attribute, value in stand_ins.items():
        setattr(module, attribute, value)
    sys.modules[name] = module
    return module


def together(
    program: Callable[..., Any], workers: int, cases: Sequence[tuple[Any, ...]]
) -> list[list[Any]]:
    """What `program(rank, *case)` returns for each case, in processes that make a group of torch.

    Returns:
      A list for each case, of what came of each rank.
    """
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        # Forked, because to import everything again takes longer than all else; they run no JAX.
        processes: Any = torch.multiprocessing
        processes.start_processes(
            _member, (program, workers, folder, cases), nprocs=workers, start_method="fork"
        )
        found = [pathlib.Path(folder, str(rank)).read_bytes() for rank in range(workers)]
    return [list(ranks) for ranks in zip(*map(pickle.loads, found), strict=True)]


def each(
    program: Callable[..., Any],
    checkout: pathlib.Path | None,
    cases: Sequence[tuple[Any, ...]],
    workers: int = 3,
    **options: Any,
) -> Iterator[tuple[tuple[Any, ...], np.ndarray, list[Any]]]:
    """Each case, which begins with a shape, its gradients, and what came of it on each rank.

    The program is given the checkout, the gradients, and the rest of the case.
    """
    given = [gradients(shape, workers=workers, **options) for shape, *_ in cases]
    whole = [(checkout, rows, *case[1:]) for rows, case in zip(given, cases, strict=True)]
    yield from zip(cases, given, together(program, workers, whole), strict=True)


def _member(
    rank: int,
    program: Callable[..., Any],
    workers: int,
    folder: str,
    cases: Sequence[tuple[Any, ...]],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
    found = [program(rank, *case) for case in cases]
    pathlib.Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
