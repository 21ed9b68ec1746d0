"""`fftgrad bench`: how fast this machine is at it."""

import argparse
import os
import pathlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fftgrad.advise import load_gradients
from fftgrad.advise._timing import Timed
from fftgrad.advise.commands._arguments import (
    add_json,
    counts,
    in_file,
    is_read_by_people,
    png_file,
    seconds,
)
from fftgrad.advise.commands._codec_times import (
    CODECS,
    SizeTimes,
    SumTime,
    heavy_tailed,
    time_codecs,
    time_collectives,
)
from fftgrad.advise.commands._show import (
    bits_per_second,
    number_of_values,
    paragraph,
    quantity,
    table,
    three_digits,
    write_json,
)

HELP = "how fast this machine compresses: a report to read, or to attach to an issue"
EPILOG = """\
the machine and its codecs, and a report of it:
  fftgrad bench
  fftgrad bench --sizes 4Mi --json report.json --png report.png
"""

SMOKE = ("bfloat16", "top-k 1 %", "sign")
SPREAD = "spread: the median above the fastest round. GB/s: of float32, compressing."
COPIES = "copies: both ways, in memory copies."
BELOW = """\
pays below: between two workers over a faster link it takes longer than the bytes that it saves of
float32."""
ROOM = 80
"""The columns of a terminal that has room for all; a narrower one shows no derived ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench`."""
    add = parser.add_mutually_exclusive_group().add_argument
    text = "lengths of the random, heavy-tailed vectors (default: 1Mi,16Mi)"
    add("--sizes", type=counts, default=(2**20, 2**24), metavar="N,N", help=text)
    text = "time on these instead: .npz"
    add("--gradients", type=in_file, metavar="FILE", help=text)
    add = parser.add_argument
    text = "how long to time each length, about; compiling comes on top (default: 10)"
    add("--seconds", type=seconds, default=10.0, metavar="S", help=text)
    add("--smoke", action="store_true", help="try it: few codecs, 64Ki values")
    add_json(parser)
    add("--png", type=png_file, metavar="FILE", help="draw the times of the codecs as bars")


def run(args: argparse.Namespace, console: Console) -> None:
    """Times, prints and writes the report."""
    names = SMOKE if args.smoke else tuple(CODECS)
    seconds = min(args.seconds, 0.1) if args.smoke else args.seconds
    here, told = machine(), is_read_by_people(args)
    if told:
        _show_machine(here, console)
    sized: list[SizeTimes] = []
    for x in _vectors(args):
        sized.append(time_codecs(x, names, seconds))
        if told:
            _show_sized(sized[-1], console)
    largest = max(one.values for one in sized)
    sums = time_collectives([max(1, largest // part) for part in (256, 16, 1)], seconds)
    if told:
        _show_sums(sums, console)
    write_json(here | {"sizes": sized, "all_reduce": sums}, args.json, console)
    if args.png:
        from fftgrad.advise.commands import _draw  # only here: the rest works without matplotlib

        _draw.bars(dict(map(_panel, sized)), "ms", args.png)


def _vectors(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """What to time on, one after the other."""
    if not args.gradients:
        yield from map(heavy_tailed, (2**16,) if args.smoke else args.sizes)
        return
    trees = load_gradients(args.gradients).trees
    whole = np.concatenate([np.ravel(leaf) for tree in trees for leaf in tree.values()])
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite
        whole = whole.astype(np.float32)
    if not whole.any() or not np.isfinite(whole).all():
        raise ValueError(
            f"bench(--gradients): must be finite, and not all zero, got {args.gradients}; pass "
            "the gradients of a good step."
        )
    yield whole


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
    has_room = console.width >= ROOM
    derived = ("spread", "GB/s", "copies") if has_room else ()
    columns = ("com-\npress", "decom-\npress", *derived, "sent", "ratio", "pays below")
    out = table("codec", *columns, title=title)
    for row in one.codecs:
        spread = max(_spread(row.compress), _spread(row.decompress))
        derived = (
            f"{spread:.0%}",
            three_digits(row.bytes_per_second / 1e9),
            three_digits(row.copies),
        )
        out.add_row(
            row.name,
            quantity(row.compress.seconds, "s"),
            quantity(row.decompress.seconds, "s"),
            *(derived if has_room else ()),
            quantity(row.wire_bytes, "B"),
            three_digits(row.ratio),
            bits_per_second(row.pays_below),
        )
    console.print(out)
    paragraph(f"{SPREAD} {COPIES} {BELOW}" if has_room else BELOW, console)


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


def _panel(one: SizeTimes) -> tuple[str, dict[str, dict[str, float]]]:
    """A bar for each codec, in milliseconds."""
    times = {
        row.name: {"compress": row.compress, "decompress": row.decompress} for row in one.codecs
    }
    bars = {name: {part: 1e3 * t.seconds for part, t in own.items()} for name, own in times.items()}
    return f"{number_of_values(one.values)} values", bars


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
