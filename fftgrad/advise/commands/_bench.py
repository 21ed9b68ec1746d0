"""`fftgrad bench`: how fast this machine is at it."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from fftgrad.advise._timing import Timed
from fftgrad.advise.commands import _files, _json
from fftgrad.advise.commands._arguments import add_outputs, counts, in_file, seconds, tells
from fftgrad.advise.commands._codec_times import (
    CODECS,
    SizeTimes,
    SumTime,
    heavy_tailed,
    time_codecs,
    time_collectives,
)
from fftgrad.advise.commands._machine import machine
from fftgrad.advise.commands._text import (
    bits_per_second,
    number_of_values,
    quantity,
    table,
    three_digits,
)

HELP = "how fast this machine compresses: a report to read, or to attach to an issue"
EPILOG = """\
the machine and its codecs, and a report of it:
  fftgrad bench
  fftgrad bench --sizes 4Mi --json report.json --png report.png
"""

SMOKE = ("bfloat16", "top-k 1 %", "sign")
LEGEND = """\
spread: the median above the fastest round. GB/s: of float32, compressing.
copies: both ways, in memory copies. pays below: between two workers over a
faster link it takes longer than the bytes that it saves of float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench`."""
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--sizes",
        type=counts,
        default=(2**20, 2**24),
        metavar="N,N",
        help="lengths of the random, heavy-tailed vectors (default: 1Mi,16Mi)",
    )
    data.add_argument(
        "--gradients",
        type=in_file,
        metavar="FILE",
        help="time on these instead: .npz, .npy, .safetensors",
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=10.0,
        metavar="S",
        help="how long to time each length, about; compiling comes on top (default: 10)",
    )
    parser.add_argument("--smoke", action="store_true", help="try it: few codecs, 64Ki values")
    add_outputs(parser, "the times of the codecs as bars")


def run(args: argparse.Namespace, console: Console) -> int:
    """Times, prints and writes the report."""
    names = SMOKE if args.smoke else tuple(CODECS)
    seconds = min(args.seconds, 0.1) if args.smoke else args.seconds
    here = machine()
    if tells(args):
        _show_machine(here, console)
    sized: list[SizeTimes] = []
    for x in _vectors(args):
        sized.append(time_codecs(x, names, seconds))
        if tells(args):
            _show_sized(sized[-1], console)
    largest = max(one.values for one in sized)
    sums = time_collectives([max(1, largest // part) for part in (256, 16, 1)], seconds)
    if tells(args):
        _show_sums(sums, console)
    _json.write(here | {"sizes": sized, "all_reduce": sums}, args.json, console)
    if args.png:
        from fftgrad.advise.commands import _bars  # only here: the rest works without matplotlib

        _bars.draw(_panels(sized), "ms", args.png)
    return 0


def _vectors(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """What to time on, one after the other."""
    if args.gradients:
        found = _files.arrays("bench(--gradients)", args.gradients)
        whole = np.concatenate([np.ravel(x).astype(np.float32) for x in found.values()])
        if not whole.any() or not np.isfinite(whole).all():
            raise ValueError(
                f"bench(--gradients): must be finite, and not all zero, got {args.gradients}; pass "
                "the gradients of a good step."
            )
        yield whole
        return
    for n in (2**16,) if args.smoke else args.sizes:
        yield heavy_tailed(n)


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
    columns = ("com-\npress", "decom-\npress", "spread", "GB/s", "copies", "sent", "ratio")
    out = table("codec", *columns, "pays below", title=title)
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
    console.print(LEGEND, markup=False, highlight=False)


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


def _panels(sized: Sequence[SizeTimes]) -> dict[str, dict[str, dict[str, float]]]:
    """A bar for each codec, in milliseconds."""
    return {
        f"{number_of_values(one.values)} values": {
            row.name: {
                "compress": 1e3 * row.compress.seconds,
                "decompress": 1e3 * row.decompress.seconds,
            }
            for row in one.codecs
        }
        for one in sized
    }
