"""Devices that a plan is for: accelerators by their public figures, or a measured machine."""

import datetime
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COPY_VALUES = 1 << 22
ROUNDS = 20
"""Timed runs, of which the fastest counts, because others share the machine."""


class Device(NamedTuple):
    """A device, by the figures that codec times follow from."""

    name: str
    platform: str  # as JAX calls it: "cpu", "gpu" or "tpu"
    bytes_per_second: float  # that a kernel reads and writes
    flops_per_second: float  # of products of float32 matrices at JAX's default precision
    date: str  # of the figures
    launch: float = 4e-6  # seconds of a kernel that does nothing
    passes: float = 1.0  # bytes that a program moves, in those of the program for an H100
    error: float = 4.0  # the factor within which codec times are expected


STREAM, PRODUCT = 0.8, 0.4
"""The shares of a peak that kernels are expected to reach: on memory, and in matrix products."""
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
    """The device of a name, of a file of `fftgrad bench`, or "this" one."""
    if device == "this":
        return this()
    if device in KNOWN:
        return KNOWN[str(device)]
    path = pathlib.Path(device)
    try:
        return Device(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError):
        raise ValueError(
            f"plan(device): must be 'this', {', '.join(map(repr, KNOWN))} or a file of `fftgrad "
            f"bench`, got {str(device)!r}; run `fftgrad bench` on the device, and pass its file."
        ) from None


def kept() -> pathlib.Path:
    """The file that keeps the figures of this machine."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "fftgrad" / f"{_kind().replace(' ', '-').lower()}.json"


def this() -> Device:
    """The device of this process, measured once: later calls read the file."""
    return find(kept()) if kept().exists() else measure()


def measure() -> Device:
    """Measure the device of this process, and keep its figures in a file."""
    found = measured()
    kept().parent.mkdir(parents=True, exist_ok=True)
    kept().write_text(json.dumps(found._asdict(), indent=1))
    return found


def measured() -> Device:
    """The figures of this device, which take a second or two."""
    cpu = jax.default_backend() == "cpu"
    side = 1024 if cpu else 8192
    x = jnp.ones((side, side), jnp.float32) / side
    product = jax.jit(lambda x: x @ x)
    return Device(
        name=f"{_kind()}, {os.cpu_count()} cores" if cpu else _kind(),
        platform=jax.default_backend(),
        bytes_per_second=8 * COPY_VALUES / copy_seconds(),
        flops_per_second=2 * side**3 / _least(lambda: product(x)),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        **(TPU if jax.default_backend() == "tpu" else {}),
    )


def copy_seconds() -> float:
    """Seconds of a copy into memory that was used before, because fresh memory takes longer."""
    if jax.default_backend() == "cpu":  # on one thread: others may have the other processors
        x, into = (np.ones(COPY_VALUES, np.float32) for _ in range(2))
        return _least(lambda: np.copyto(into, x))
    many = jnp.ones(16 * COPY_VALUES, jnp.float32)  # so that the launch is a small part
    copy = jax.jit(lambda x: x * 2.0)
    return _least(lambda: copy(many)) / 16


def _least(run: Callable[[], Any]) -> float:
    """Seconds of the fastest run; the first compiles."""
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _kind() -> str:
    return jax.local_devices()[0].device_kind
