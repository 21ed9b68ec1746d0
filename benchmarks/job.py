"""What a worker is told, and what it tells in return."""

import dataclasses
import json
import math
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
    workload: str
    method: str
    steps: int
    seed: int
    params: str  # file with the first parameters
    target: float | None  # the held-out metric at which to stop, if it is reached before `steps`
    assess_every: int  # steps between assessments; 0 for none
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
    assess: Callable[[], float]  # the held-out metric of the present parameters
    # the sum of a number over the workers, when all have come that far
    agree: Callable[[float], float]
    facts: dict[str, Any]  # what else is to be noted
    # steps to an exchange, between two of which nothing is assessed: the workers differ
    every: int = 1


def work(job: Job, prepare: Callable[[Job], Framework]) -> None:
    """Trains to the end of the job, and writes a line for each step and each assessment.

    The clock counts training only: compiling and assessing do not take from it.
    """
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
    framework.agree(0.0)  # the clock starts when all are ready
    # The workers differ between two exchanges.
    period = framework.every * math.ceil(job.assess_every / framework.every)
    clock, done = 0.0, False
    for step in range(job.steps):
        before, start = traffic(job.interface), time.perf_counter()
        phases = framework.step(step)
        seconds = time.perf_counter() - start
        sent = [now - then for now, then in zip(traffic(job.interface), before, strict=True)]
        clock += seconds
        write(step=step, seconds=seconds, clock=clock, loss=framework.loss(), **phases, sent=sent)
        if period and (step + 1) % period == 0:
            own = framework.assess() if job.worker == 0 else 0.0
            metric = framework.agree(own)
            write(assessed=metric, after=step + 1, clock=clock)
            if job.target is not None:
                done = metric <= job.target
        if done:
            break
    framework.agree(0.0)
