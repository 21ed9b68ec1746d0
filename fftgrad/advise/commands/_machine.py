"""What a figure depends on: versions, and the machine."""

import os
import pathlib
import platform
import re
from importlib import metadata
from typing import Any

import jax

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
    stats = device.memory_stats() or {}
    return {
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "system": platform.platform(),
        "processor": _processor(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(devices),
        "device_memory_bytes": stats.get("bytes_limit"),
        "runtime": " ".join(device.client.platform_version.split()),
    }


def _processor() -> str:
    """By its name, which Linux has in a file."""
    file = pathlib.Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _cores() -> int | None:
    """Those that this process may use, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _memory() -> int | None:
    """Bytes, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
