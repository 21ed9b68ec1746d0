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


TOLD = "FFTGRAD_TESTS_TOLD"
"""The environment variable with the file into which a program tells the test that started it."""


def tell(*words: object) -> None:
    """A line for the test. Gloo prints too, from several threads into lines of the output."""
    with pathlib.Path(os.environ[TOLD]).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


class Process(NamedTuple):
    """One of them, and what it has written so far."""

    popen: "subprocess.Popen[bytes]"
    out: pathlib.Path
    err: pathlib.Path
    lines: pathlib.Path

    @property
    def told(self) -> list[str]:
        """The lines that it has told."""
        return self.lines.read_text().splitlines()

    def wait(self, seconds: float = 240.0) -> int:
        """Its exit code. The limit is for a machine that has other things to do."""
        return self.popen.wait(seconds)

    def said(self, text: str, seconds: float = 240.0) -> bool:
        """Whether it has printed or told a text before the time was over, or it ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.popen.poll() is None:
            if self._said(text):
                return True
            time.sleep(0.02)
        return self._said(text)

    def _said(self, text: str) -> bool:
        return text in self.out.read_text() or text in self.lines.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def environment_of(cache: pathlib.Path) -> dict[str, str]:
    """Of programs of one device that compile little, and each program once."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", ROOT / "tests/loopback"])),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # As many for one process with all devices as for several: what is computed in how many
        # threads may round otherwise.
        "PJRT_NPROC": str(4 * WORKERS),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@contextlib.contextmanager
def running(
    folder: pathlib.Path,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]] = (),
    *,
    cache: pathlib.Path,
) -> Iterator[list[Process]]:
    """Each of these Python programs in a process; none of them outlives this."""
    common = environment_of(cache) | {"JAX_NUM_CPU_DEVICES": str(WORKERS // len(commands))}
    processes: list[Process] = []
    try:
        for number, command in enumerate(commands):
            own = environments[number] if environments else {}
            out, err, told = (folder / f"{number}.{kind}" for kind in ("out", "err", "told"))
            told.write_text("")
            with out.open("wb") as stdout, err.open("wb") as stderr:
                popen = subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **common, TOLD: str(told), **own},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            processes.append(Process(popen, out, err, told))
        yield processes
    finally:
        for process in processes:
            process.popen.kill()
            process.popen.wait()
