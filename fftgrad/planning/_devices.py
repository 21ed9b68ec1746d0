"""Devices of a plan, and codec times on these devices, from tables of measured programs."""

import datetime
import functools
import importlib.resources
import json
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fftgrad as fg
from fftgrad._contracts import PyTree
from fftgrad.exchanges._bucketing import BUCKET_LIMIT
from fftgrad.planning._candidates import Candidate
from fftgrad.planning._predict import Groups, count
from fftgrad.planning._timing import Timing, timed

COPY_VALUES = 1 << 22
ROUNDS = 20
"""Number of timed runs. The fastest counts, because other processes may use the machine."""


class Device(NamedTuple):
    """A device, with the figures that predict codec times."""

    name: str
    platform: str  # as JAX calls it: "cpu", "gpu" or "tpu"
    bytes_per_second: float  # that a kernel reads and writes
    flops_per_second: float  # of products of float32 matrices at JAX's default precision
    date: str  # of the figures
    launch: float = 4e-6  # seconds of a kernel that does nothing
    passes: float = 1.0  # bytes that a program moves, divided by those of the program for an H100
    error: float = 4.0  # factor by which a codec time may be wrong


STREAM, PRODUCT = 0.8, 0.4
"""Shares of the peak that kernels are expected to reach: of memory, and of matrix products."""
# Peaks of the vendors' data sheets: bytes a second, and dense TF32 or, on a TPU, bfloat16 flops.
TPU: dict[str, Any] = {"launch": 1e-6, "passes": 12.0, "error": 10.0}
# A launch takes 3 to 5 us on a GPU. A TPU runs its program without a host, but XLA's own count of
# bytes is 12 times that of an H100's program, in the geometric mean of 20 programs of codecs
# (benchmarks/results/programs), between 1 and 71 times.
KNOWN = {
    name.lower(): Device(name, platform, STREAM * memory, PRODUCT * flops, "2026-11-28", **others)
    for name, platform, memory, flops, others in (
        ("H100", "gpu", 3.35e12, 495e12, {}),
        ("A100", "gpu", 2.04e12, 156e12, {}),
        ("L40S", "gpu", 0.864e12, 183e12, {}),
        ("v5e", "tpu", 0.819e12, 197e12, TPU),
    )
}


def find(device: str | os.PathLike[str]) -> Device:
    """Return a device by its name or its file of `fftgrad bench`; "this" is measured once."""
    if known := KNOWN.get(str(device).lower()):
        return known
    path = kept() if device == "this" else pathlib.Path(device)
    if device == "this" and not path.exists():
        return measure()
    try:
        return Device(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError):
        raise ValueError(
            f"plan(device): must be 'this', {', '.join(map(repr, KNOWN))} or a file of `fftgrad "
            f"bench`, got {str(path)!r}; run `fftgrad bench` on the device, and pass its file."
        ) from None


def kept() -> pathlib.Path:
    """Return the file with this device's figures; its name has the host, as hosts may share it."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    name = f"{platform.node()}-{_kind()}.json".replace(" ", "-").lower()
    return pathlib.Path(folder) / "fftgrad" / name


def measure() -> Device:
    """Measure the device of this process, and save its figures in a file."""
    found = measured()
    kept().parent.mkdir(parents=True, exist_ok=True)
    kept().write_text(json.dumps(found._asdict(), indent=1))
    return found


def measured() -> Device:
    """Measure the figures of this device, in one or two seconds."""
    cpu = jax.default_backend() == "cpu"
    side = 1024 if cpu else 8192
    x = jnp.ones((side, side), jnp.float32) / side
    product = jax.jit(lambda x: x @ x)
    return Device(
        name=f"{_kind()}, {os.cpu_count()} cores" if cpu else _kind(),
        platform=jax.default_backend(),
        bytes_per_second=8 * COPY_VALUES / copy_seconds(),
        flops_per_second=2 * side**3 / timed(product, [x], 0.0, ROUNDS).least,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        **(TPU if jax.default_backend() == "tpu" else {}),
    )


def copy_seconds() -> float:
    """Time a copy into memory that was written before, because fresh memory takes longer."""
    if jax.default_backend() == "cpu":  # one thread, because other processes may use other cores
        x, into = (np.ones(COPY_VALUES, np.float32) for _ in range(2))
        return timed(lambda x: np.copyto(into, x), [x], 0.0, ROUNDS).least
    many = jnp.ones(16 * COPY_VALUES, jnp.float32)  # so that the launch is a small part
    return timed(jax.jit(lambda x: x * 2.0), [many], 0.0, ROUNDS).least / 16


def _kind() -> str:
    return jax.local_devices()[0].device_kind


MUONS = (fg.optimizers.feedback_muon, optax.contrib.muon)
ITERATIONS = 5
"""Newton-Schulz iterations of an orthogonalization."""
TICK = 1e-7
"""Shortest measurable time."""
PASSES = 8
"""Passes over a gradient for the two dense collectives of `Hierarchical` over fast links."""


class Point(NamedTuple):
    """Times of a row: seconds on a CPU, or bytes and kernels of its program for a GPU."""

    values: int
    workers: int
    compress: float
    decompress: float
    compress_kernels: float = 0.0
    decompress_kernels: float = 0.0


@functools.cache
def load_table(name: str = "timings") -> Mapping[str, Any]:
    """Load a table of the package: its head, and the points of each row by name."""
    file = importlib.resources.files("fftgrad.planning") / f"{name}.json"
    found = json.loads(file.read_text())
    found["rows"] = {row["name"]: [Point(*p) for p in row["points"]] for row in found["rows"]}
    return found


def from_table(
    rows: Sequence[Candidate], like: PyTree, groups: Groups, device: Device
) -> tuple[dict[str, Timing], str]:
    """Predict codec times on a device; return them with sentences about their source."""
    find = _measured if device.platform == "cpu" else _counted
    found, values = dict[str, Timing](), count(like)
    workers, fast, _ = groups
    for row in rows:
        compress, decompress = find(row, values // fast, workers, device)
        muon = 0.0
        if getattr(row.optimizer, "func", row.optimizer) in MUONS:
            muon = orthogonalizing(like) / device.flops_per_second
        if isinstance(row.recipe.exchange, fg.Eigenbasis):
            decompress += turning(like) / device.flops_per_second
        if fast > 1:
            decompress += PASSES * 4 * values / device.bytes_per_second
        found[row.name] = Timing(compress, decompress, muon)
    if device.platform == "cpu":
        table = load_table()
        slower = _slower(device)
        return found, (
            f"Codec times: measured on {table['machine']} ({table['date']}), times {slower:.2g}, "
            f"because a memory copy takes {slower:.2g} times as long on {device.name} (measured "
            f"{device.date}). To time the codecs here, pass --measure (measure=True)."
        )
    table = load_table("programs")
    return found, (
        f"Codec times: bytes and kernels of programs compiled for an H100 ({table['date']}), at "
        f"{device.bytes_per_second / 1e12:.2g} TB/s and {device.launch * 1e6:g} us a kernel for "
        f"{device.name}. Nothing ran on it: expect up to {device.error:g} times these times."
    )


def orthogonalizing(like: PyTree) -> float:
    """Count multiplications and additions of Muon, without embeddings and heads."""
    sides = (sorted(shape) for shape in matrices(like))
    return float(sum(ITERATIONS * (4 * a * a * b + 2 * a**3) for a, b in sides))


def matrices(like: PyTree) -> list[tuple[int, int]]:
    """Return the shapes of the matrices that Muon orthogonalizes."""
    numbers = fg.optimizers.muon_dimensions(like)
    is_leaf = lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)  # noqa: E731
    pairs = zip(jax.tree.leaves(like), jax.tree.leaves(numbers, is_leaf=is_leaf), strict=True)
    return [leaf.shape for leaf, own in pairs if own is not None and len(leaf.shape) == 2]


def turning(like: PyTree, largest: int = fg.Eigenbasis(fg.AllReduce()).largest) -> float:
    """Count multiplications and additions of `Eigenbasis`, for sides of at most `largest` values.

    Per step, products rotate the gradient, and rotate the mean and the sent values back. Others
    update the averages, and sometimes compute new bases.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(like) if len(leaf.shape) == 2]
    sides = [(side, a * b) for a, b in shapes for side in (a, b) if 1 < side <= largest]
    return float(sum(8 * size * side + side**3 for side, size in sides))


def _slower(device: Device) -> float:
    """Return the copy time on the device, divided by the copy time on the table's machine."""
    return 8 * COPY_VALUES / load_table()["copy_seconds"] / device.bytes_per_second


def _measured(row: Candidate, values: int, workers: int, device: Device) -> tuple[float, float]:
    """Predict seconds to compress and decompress on a CPU from times on another CPU."""
    slower = _slower(device)
    points = load_table()["rows"][row.name]
    most = max(p.workers for p in points)
    line = [p for p in points if p.workers == most]
    compress = _at([(p.values, p.compress) for p in line], values)
    decompress = _at([(p.values, p.decompress) for p in line], values)
    if _gathers(row):
        few, many = (p for p in points if [q.values for q in points].count(p.values) == 2)
        each = max(0.0, many.decompress - few.decompress) / (many.workers - few.workers)
        others = (workers - most) * (each / few.values) * values
        decompress = max(decompress * min(1.0, workers / most), decompress + others)
    return compress * slower, decompress * slower


def _counted(row: Candidate, values: int, workers: int, device: Device) -> tuple[float, float]:
    """Predict seconds to compress and decompress from the bytes and kernels of a program."""
    (point,) = load_table("programs")["rows"][row.name]
    moved = device.passes * values / point.values / device.bytes_per_second
    launches = device.launch * math.ceil(values / BUCKET_LIMIT)
    compress = moved * point.compress + launches * point.compress_kernels
    decompress = moved * point.decompress + launches * point.decompress_kernels
    return compress, decompress * (workers / point.workers if _gathers(row) else 1.0)


def _gathers(row: Candidate) -> bool:
    """Return True if each worker decodes the payloads of all workers."""
    exchange = row.recipe.exchange
    own = exchange.slow if isinstance(exchange, fg.Hierarchical) else exchange
    return isinstance(own, fg.AllGather)


def _at(points: Sequence[tuple[int, float]], values: int) -> float:
    """Interpolate between two sizes by a power law; beyond the largest, in proportion."""
    sizes, seconds = zip(*points, strict=True)
    if values >= sizes[-1]:
        return seconds[-1] * values / sizes[-1]
    logs = np.log(np.maximum(seconds, TICK))
    return float(np.exp(np.interp(math.log(max(values, 1)), np.log(sizes), logs)))
