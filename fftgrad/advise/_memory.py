"""Whether what is about to be timed fits into the memory that there is."""

import pathlib
import re
from typing import Any

import jax

from fftgrad._contracts import PyTree
from fftgrad.advise import _inputs
from fftgrad.advise._timing import Agree

LEAST = 3
"""Arrays like the parameters: these and two gradients."""


def check_least(owner: str, like: PyTree, agree: Agree = float) -> None:
    """Refuses a model that no row could be timed for, before anything is compiled."""
    _refuse(owner, _inputs.count(like), LEAST * 4 * _inputs.count(like), agree)


def check(owner: str, program: jax.stages.Compiled, like: PyTree, agree: Agree = float) -> None:
    """Refuses a program that does not fit, beside the second gradient that it is timed with."""
    used, values = program.memory_analysis(), _inputs.count(like)
    if used is not None:
        results = used.output_size_in_bytes - used.alias_size_in_bytes
        sizes = used.argument_size_in_bytes + results + used.temp_size_in_bytes
        _refuse(owner, values, sizes + 4 * values, agree)


def _refuse(owner: str, values: int, needs: int, agree: Agree) -> None:
    free = available()
    missing = 0 if free is None else needs - free
    # All processes refuse, or none: one that did alone would leave the others waiting.
    if agree(float(missing)) <= 0:
        return
    remedy = "leave measure out, or " if owner == "plan" else ""
    where = "fewer" if free is None or missing <= 0 else f"{free / 1e9:.3g}"
    raise ValueError(
        f"{owner}(params): must fit into the memory of this device to be timed, got {values:,} "
        f"values, which take {needs / 1e9:.3g} GB or more where {where} are free; {remedy}time it "
        "on a larger machine."
    )


def available() -> int | None:
    """Bytes that are free on the default device; None if nobody says."""
    device: Any = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    known = pathlib.Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", known.read_text()) if known.exists() else None
    return int(found[1]) * 1024 if found else None
