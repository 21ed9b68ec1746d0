"""What a worker is told, and what it tells in return."""

import dataclasses
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

FAILED = 3
GRADIENTS = 18
"""How many times the memory of its parameters a worker has at hand."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One worker's part of one training run."""

    worker: int
    workers: int
    coordinator: str  # address and port of worker 0's service
    interface: str
    method: str
    steps: int
    seed: int
    params: str  # file with the first parameters
    folder: str  # where to write
    smoke: bool

    def dumps(self) -> str:
        """The job as a command-line argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Job":
        """The inverse."""
        return cls(**json.loads(text))


def save_params(params: Any, path: str) -> None:
    """Parameters as a NumPy archive, by path."""
    named: Any = flatten_dict(params, sep="/")
    np.savez(path, **named)


def load_params(path: str) -> Any:
    """The inverse, as nested dicts."""
    with np.load(path) as archive:
        return unflatten_dict(dict(archive), sep="/")


def traffic(interface: str) -> tuple[int, int]:
    """Bytes and packets that have left by an interface of this process's namespace."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            count, packets = counts.split()[8:10]
            return int(count), int(packets)
    raise ValueError(f"there is no interface {interface}")


class Framework(NamedTuple):
    """What differs between JAX and PyTorch, once a worker is ready to train."""

    # makes one step on the next batch, and returns the seconds of its phases
    step: Callable[[int], dict[str, float]]
    loss: Callable[[], float]  # the loss of this worker's batch in the last step
    wait: Callable[[], None]  # until all workers have come that far
    facts: dict[str, Any]  # what else is to be noted


def work(job: Job, prepare: Callable[[Job], Framework]) -> None:
    """Trains to the end of the job, and writes a line for each step."""
    try:
        _fill_heap(job)
        path = pathlib.Path(job.folder) / f"worker{job.worker}.jsonl"
        with path.open("w", buffering=1) as lines:
            _train(job, prepare(job), lines)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        # What waits for peers in a destructor would wait for ever, if one of them has died.
        os._exit(FAILED)


def _fill_heap(job: Job) -> None:
    """Touches as much memory as training will need, which the allocator then keeps.

    Otherwise the heap still grows in some of the steps, and these take two or three times as long.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = GRADIENTS * pathlib.Path(job.params).stat().st_size
    bytearray(min(wanted, memory * 3 // 4 // job.workers))


def _train(job: Job, framework: Framework, lines: TextIO) -> None:
    def write(**record: Any) -> None:
        lines.write(json.dumps(record) + "\n")

    write(facts=framework.facts)
    framework.wait()  # the clock starts when all are ready
    for step in range(job.steps):
        before, start = traffic(job.interface), time.perf_counter()
        phases = framework.step(step)
        seconds = time.perf_counter() - start
        sent = [now - then for now, then in zip(traffic(job.interface), before, strict=True)]
        write(step=step, seconds=seconds, loss=framework.loss(), **phases, sent=sent)
    framework.wait()
