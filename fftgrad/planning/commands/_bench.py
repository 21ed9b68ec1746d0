"""`fftgrad bench`: how fast this machine is at it."""

import argparse
import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console

import fftgrad as fg
from fftgrad.planning._timing import Task, Timed, timed_in_turn
from fftgrad.planning.commands._text import (
    add_json,
    bits_per_second,
    counts,
    is_read_by_people,
    paragraph,
    progress,
    quantity,
    seconds,
    table,
    three_digits,
    write_json,
)

HELP = "how fast this machine compresses: a report to read, or to attach to an issue"
EPILOG = """\
the machine and its codecs, and a report of it:
  fftgrad bench
  fftgrad bench --sizes 4Mi --json report.json
"""

CODECS: dict[str, fg.Codec] = {
    "bfloat16": fg.Cast("bfloat16"),
    "8 bits": fg.RangeFloat(bits=8),
    "QSGD, 4 bits": fg.UniformLevels(bits=4),
    "ternary": fg.Ternary(),
    "sign": fg.Sign(),
    "EDEN, 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "top-k 1 %": fg.chain(fg.TopK(fraction=0.01), fg.LogLevels(bits=4)),
    "top-k 0.1 %": fg.chain(fg.TopK(fraction=0.001), fg.LogLevels(bits=4)),
    "threshold 1 %": fg.chain(fg.Threshold(fraction=0.01), fg.LogLevels(bits=4)),
    "random-k 1 %": fg.RandomK(fraction=0.01),
    "FFT 64, 1 %": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), fg.LogLevels(bits=4)),
    "DCT 64, DeMo": fg.chain(fg.Dct(block=64), fg.ChunkTopK(chunk=64), fg.Cast("bfloat16")),
    "DCT 64, budget": fg.chain(fg.Dct(block=64), fg.Budget(ratio=100)),
    "budget": fg.Budget(ratio=100),
}
"""One of each family, by short names."""
INPUTS = 3

SMOKE = ("bfloat16", "top-k 1 %", "sign")
LEGEND = """\
spread: the median above the fastest round. GB/s: of float32, compressing. copies: both ways, in
memory copies. pays below: between two workers over a faster link it takes longer than the bytes
that it saves of float32."""


class CodecTimes(NamedTuple):
    """One codec at one size."""

    name: str  # a short one
    codec: str  # the call that makes it
    compress: Timed  # seconds
    decompress: Timed
    bytes_per_second: float  # of float32 input, while compressing
    copies: float  # both together, in times of a memory copy
    wire_bytes: int  # of one payload
    ratio: float  # bytes of float32 / wire bytes
    # bytes per second. Of two workers over a faster link, none gains by it: it saves fewer bytes
    # than the link would have sent in the time it takes
    pays_below: float


class SizeTimes(NamedTuple):
    """What was found for vectors of one length, and for a copy of one."""

    values: int
    copy: Timed
    codecs: tuple[CodecTimes, ...]


class SumTime(NamedTuple):
    """The sum of a float32 vector over all devices of this process."""

    values: int
    devices: int
    time: Timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench`."""
    add = parser.add_argument
    text = "lengths of the random, heavy-tailed vectors (default: 1Mi,16Mi)"
    add("--sizes", type=counts, default=(2**20, 2**24), metavar="N,N", help=text)
    text = "how long to time each length, about; compiling comes on top (default: 10)"
    add("--seconds", type=seconds, default=10.0, metavar="S", help=text)
    add("--smoke", action="store_true", help="try it: few codecs, 64Ki values")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> None:
    """Times, prints and writes the report."""
    names = SMOKE if args.smoke else tuple(CODECS)
    seconds = min(args.seconds, 0.1) if args.smoke else args.seconds
    here, told = machine(), is_read_by_people(args)
    if told:
        _show_machine(here, console)
    sized: list[SizeTimes] = []
    for n in (2**16,) if args.smoke else args.sizes:
        sized.append(time_codecs(heavy_tailed(n), names, seconds))
        if told:
            _show_sized(sized[-1], console)
    largest = max(one.values for one in sized)
    sums = time_collectives([max(1, largest // part) for part in (256, 16, 1)], seconds)
    if told:
        _show_sums(sums, console)
    write_json(here | {"sizes": sized, "all_reduce": sums}, args.json, console)


def _show_machine(here: Mapping[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    memory = here["memory_bytes"] and quantity(here["memory_bytes"], "B")
    lines = {
        "versions": versions,
        "devices": f"{here['devices']} x {here['device']} ({here['platform']})",
        "machine": f"{here['processor']}, {here['cores']} cores, {memory or 'unknown'} of memory",
        "system": here["system"],
    }
    for name, text in lines.items():
        console.print(f"{name:9} {text}", markup=False, highlight=False)


def _show_sized(one: SizeTimes, console: Console) -> None:
    size = 4 * one.values
    speed = quantity(size / one.copy.seconds, "B/s")
    title = (
        f"\n{number_of_values(one.values)} values, {quantity(size, 'B')}; "
        f"a copy of them takes {quantity(one.copy.seconds, 's')}, {speed}"
    )
    derived = "spread", "GB/s", "copies"
    columns = ("com-\npress", "decom-\npress", *derived, "sent", "ratio", "pays below")
    out = table("codec", *columns, title=title)
    for row in one.codecs:
        spread = max(_spread(row.compress), _spread(row.decompress))
        out.add_row(
            row.name,
            quantity(row.compress.seconds, "s"),
            quantity(row.decompress.seconds, "s"),
            f"{spread:.0%}",
            three_digits(row.bytes_per_second / 1e9),
            three_digits(row.copies),
            quantity(row.wire_bytes, "B"),
            three_digits(row.ratio),
            bits_per_second(row.pays_below),
        )
    console.print(out)
    paragraph(LEGEND, console)


def number_of_values(n: int) -> str:
    """A count as it is typed: 16777216 is "16Mi"."""
    for factor, prefix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if n % factor == 0:
            return f"{n // factor}{prefix}"
    return f"{n:,}"


def _spread(time: Timed) -> float:
    """How far the median is above the fastest round; one slow round tells nothing."""
    return time.seconds / time.least - 1


def _show_sums(sums: Sequence[SumTime], console: Console) -> None:
    if not sums:
        console.print("\none device: no all-reduce to time", highlight=False)
        return
    out = table("all-reduce of", "time", "spread", "GB/s", title=f"\n{sums[0].devices} devices")
    for one in sums:
        size, time = 4 * one.values, one.time
        speed = three_digits(size / time.seconds / 1e9)
        out.add_row(quantity(size, "B"), quantity(time.seconds, "s"), f"{_spread(time):.0%}", speed)
    console.print(out)


PACKAGES = ("fftgrad", "jax", "jaxlib", "optax", "numpy")


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "not installed"


def machine() -> dict[str, Any]:
    """Versions, processor, memory and the devices that this process has."""
    device, *_ = devices = jax.local_devices()
    cpu = pathlib.Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", cpu.read_text() if cpu.exists() else "", re.M)
    affinity = getattr(os, "sched_getaffinity", None)  # of this process, where the system tells
    return {
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "system": platform.platform(),
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": _memory(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(devices),
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "runtime": " ".join(device.client.platform_version.split()),
    }


def _memory() -> int | None:
    """Bytes, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def heavy_tailed(n: int) -> np.ndarray:
    """Values as those of gradients are: heavy tails, neighbors alike; none of them zero."""
    white = np.random.default_rng(0).standard_t(3, n + 1).astype(np.float32)
    return white[1:] + np.float32(0.5) * white[:-1]


def inputs_of(x: np.ndarray) -> list[tuple[jax.Array, fg.Step]]:
    """A vector in three places and scales, each with randomness of its own."""
    return [
        (jnp.asarray(np.roll(x, i * (x.size // INPUTS)) * np.float32(1 + i)), fg.Step.of(i, i))
        for i in range(INPUTS)
    ]


def time_codecs(x: np.ndarray, names: Sequence[str], seconds: float) -> SizeTimes:
    """The times of codecs on a vector, in about so many seconds, and those of compiling."""
    inputs, like = inputs_of(x), jax.ShapeDtypeStruct(x.shape, jnp.float32)
    tasks: list[Task] = [(jax.jit(lambda a: -a[0]), inputs)]
    with progress("compiling", len(names)) as tell:
        for name in names:
            tasks += _both_ways(CODECS[name], inputs, like)
            tell(1)
    with progress("timing", seconds) as tell:
        copy, *times = timed_in_turn(tasks, seconds / len(tasks), tell=tell)
    rows = zip(names, times[::2], times[1::2], strict=True)
    return SizeTimes(x.size, copy, tuple(_row(name, like, copy, *both) for name, *both in rows))


def _both_ways(codec: fg.Codec, inputs: Any, like: jax.ShapeDtypeStruct) -> list[Task]:
    @jax.jit
    def down(a: tuple[jax.Array, fg.Step]) -> fg.Payload:
        return fg.compress(codec, a[0], step=a[1])

    @jax.jit
    def up(a: tuple[fg.Payload, fg.Step]) -> jax.Array:
        return fg.decompress(codec, a[0], like, step=a[1])

    payloads = [(down(one), one[1]) for one in inputs]
    jax.block_until_ready(up(payloads[0]))
    return [(down, inputs), (up, payloads)]


def _row(name: str, like: jax.ShapeDtypeStruct, copy: Timed, down: Timed, up: Timed) -> CodecTimes:
    codec, dense = CODECS[name], 4 * like.size
    sent, both = fg.wire_bytes(codec, like), down.seconds + up.seconds
    return CodecTimes(
        name=name,
        codec=repr(codec),
        compress=down,
        decompress=up,
        bytes_per_second=dense / down.seconds,
        copies=both / copy.seconds,
        wire_bytes=sent,
        ratio=dense / sent,
        pays_below=max(0.0, (dense - sent) / both),
    )


def time_collectives(sizes: Sequence[int], seconds: float) -> tuple[SumTime, ...]:
    """The times of an all-reduce over all devices of this process; none where there is one."""
    devices = jax.local_devices()
    if len(devices) < 2:
        return ()
    mesh = jax.make_mesh((len(devices),), ("worker",), devices=devices)
    spec = jax.NamedSharding(mesh, P("worker"))
    mean = jax.jit(
        jax.shard_map(
            lambda x: lax.pmean(x[0], "worker"), mesh=mesh, in_specs=P("worker"), out_specs=P()
        )
    )
    tasks: list[Task] = []
    for n in sizes:
        whole = np.stack([np.roll(heavy_tailed(n), i) for i in range(len(devices))])
        tasks.append((mean, [jax.device_put(whole * k, spec) for k in (1.0, 2.0)]))
    with progress("all-reduce", seconds) as tell:
        times = timed_in_turn(tasks, seconds / len(tasks), tell=tell)
    return tuple(SumTime(n, len(devices), time) for n, time in zip(sizes, times, strict=True))
