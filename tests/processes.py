"""A program in several processes of this machine, each with CPU devices of its own."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

WORKERS = 4
"""Devices of all processes together."""


class Process(NamedTuple):
    """One of them, and what it has written so far."""

    popen: "subprocess.Popen[bytes]"
    out: pathlib.Path
    err: pathlib.Path

    def wait(self, seconds: float = 240.0) -> int:
        """Its exit code. The limit is for a machine that has other things to do."""
        return self.popen.wait(seconds)

    def said(self, text: str, seconds: float = 240.0) -> bool:
        """Whether it has printed a text before the time was over, or it ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.popen.poll() is None:
            if text in self.out.read_text():
                return True
            time.sleep(0.02)
        return text in self.out.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    folder: pathlib.Path,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]] = (),
    *,
    cache: pathlib.Path,
) -> Iterator[list[Process]]:
    """Each of these Python programs in a process; none of them outlives this."""
    common = {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", ROOT / "tests/loopback"])),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(WORKERS // len(commands)),
        # As many for one process with all devices as for several: what is computed in how many
        # threads may round otherwise.
        "PJRT_NPROC": str(4 * WORKERS),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    processes: list[Process] = []
    try:
        for number, command in enumerate(commands):
            own = environments[number] if environments else {}
            out, err = folder / f"{number}.out", folder / f"{number}.err"
            with out.open("wb") as stdout, err.open("wb") as stderr:
                popen = subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **common, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            processes.append(Process(popen, out, err))
        yield processes
    finally:
        for process in processes:
            process.popen.kill()
            process.popen.wait()
