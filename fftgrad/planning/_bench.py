"""Times of each family of codecs on this machine, in seconds and in memory copies."""

import os
import pathlib
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fftgrad as fg
from fftgrad.planning._inputs import heavy_tailed
from fftgrad.planning._text import quantity, table, three_digits
from fftgrad.planning._timing import Task, Timed, timed_in_turn

CODECS: dict[str, fg.Codec] = {
    "bfloat16": fg.Cast("bfloat16"),
    "8 bits": fg.RangeFloat(bits=8),
    "QSGD, 4 bits": fg.UniformQuantizer(bits=4),
    "ternary": fg.Ternary(),
    "sign": fg.Sign(),
    "EDEN, 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "top-k 1 %": fg.chain(fg.TopK(fraction=0.01), fg.LogQuantizer(bits=4)),
    "top-k 0.1 %": fg.chain(fg.TopK(fraction=0.001), fg.LogQuantizer(bits=4)),
    "threshold 1 %": fg.chain(fg.Threshold(fraction=0.01), fg.LogQuantizer(bits=4)),
    "random-k 1 %": fg.RandomK(fraction=0.01),
    "FFT 64, 1 %": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), fg.LogQuantizer(bits=4)),
    "DCT 64, DeMo": fg.chain(fg.Dct(block=64), fg.ChunkTopK(chunk=64), fg.Cast("bfloat16")),
    "DCT 64, budget": fg.chain(fg.Dct(block=64), fg.Budget(ratio=100)),
    "budget": fg.Budget(ratio=100),
}
"""One of each family, by short names."""
PACKAGES = ("fftgrad", "jax", "jaxlib", "optax", "numpy")
LEGEND = """\
spread: the median above the fastest round. GB/s: of float32, compressing.
copies: both ways, in memory copies. pays below: between two workers over a
faster link it takes longer than the bytes that it saves of float32."""


class CodecTimes(NamedTuple):
    """One codec at one size."""

    name: str
    compress: Timed
    decompress: Timed
    wire_bytes: int  # of one payload


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "not installed"


def machine() -> str:
    """Versions, devices and processor of this process, in lines."""
    device, *_ = devices = jax.local_devices()
    cpu = pathlib.Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", cpu.read_text() if cpu.exists() else "", re.M)
    processor = named[1] if named else platform.processor() or platform.machine()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"versions  python {platform.python_version()}, {versions}\n"
        f"devices   {len(devices)} x {device.device_kind} ({device.platform})\n"
        f"machine   {processor}, {os.cpu_count()} cores, {platform.platform()}"
    )


def time_codecs(
    values: int, codecs: dict[str, fg.Codec], seconds: float
) -> tuple[Timed, list[CodecTimes]]:
    """Time a copy and codecs on heavy-tailed values, in about so many seconds."""
    like = jax.ShapeDtypeStruct((values,), jnp.float32)
    inputs = [(x, fg.Step.of(i, i)) for i, x in enumerate(heavy_tailed(like))]
    tasks: list[Task] = [(jax.jit(lambda a: -a[0]), inputs)]
    for codec in codecs.values():
        tasks += _both_ways(codec, inputs, like)
    copy, *times = timed_in_turn(tasks, seconds / len(tasks))
    both = zip(codecs.items(), times[::2], times[1::2], strict=True)
    sent = lambda codec: fg.wire_bytes(codec, like)  # noqa: E731
    return copy, [CodecTimes(name, down, up, sent(codec)) for (name, codec), down, up in both]


def _both_ways(codec: fg.Codec, inputs: Any, like: jax.ShapeDtypeStruct) -> list[Task]:
    @jax.jit
    def down(a: tuple[jax.Array, fg.Step]) -> fg.Payload:
        return fg.compress(codec, a[0], step=a[1])

    @jax.jit
    def up(a: tuple[fg.Payload, fg.Step]) -> jax.Array:
        return fg.decompress(codec, a[0], like, step=a[1])

    return [(down, inputs), (up, [(down(one), one[1]) for one in inputs])]


def show(values: int, copy: Timed, rows: Sequence[CodecTimes]) -> str:
    """The table of one size."""
    size = 4 * values
    head = ("codec", "compress", "decompress", "spread", "GB/s", "copies", "sent", "ratio")
    cells: list[tuple[str, ...]] = []
    for row in rows:
        both = row.compress.seconds + row.decompress.seconds
        spread = max(time.seconds / time.least for time in (row.compress, row.decompress)) - 1
        cells.append(
            (
                row.name,
                quantity(row.compress.seconds, "s"),
                quantity(row.decompress.seconds, "s"),
                f"{spread:.0%}",
                three_digits(size / row.compress.seconds / 1e9),
                three_digits(both / copy.seconds),
                quantity(row.wire_bytes, "B"),
                three_digits(size / row.wire_bytes),
                quantity(8 * max(0.0, (size - row.wire_bytes) / both), "bit/s"),
            )
        )
    title = (
        f"\n{values:,} values, {quantity(size, 'B')}; a copy of them takes "
        f"{quantity(copy.seconds, 's')}, {quantity(size / copy.seconds, 'B/s')}"
    )
    return "\n".join([title, table((*head, "pays below"), cells), LEGEND])
