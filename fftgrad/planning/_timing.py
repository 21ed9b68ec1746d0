"""Times of programs: medians over rounds in which each program has its turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fftgrad import _axes
from fftgrad._axes import AxisName

Task = tuple[Callable[[Any], Any], Sequence[Any]]
"""A function of one input, whose result is waited for, and inputs of one shape, in turn."""

Agree = Callable[[float], float]
"""Waits for all workers, and returns the greatest of their numbers."""


class Timed(NamedTuple):
    """The times of a program."""

    seconds: float  # the median over the rounds
    least: float  # of the fastest round
    rounds: int


def timed(
    run: Callable[[Any], Any],
    inputs: Sequence[Any],
    seconds: float,
    least_rounds: int = 3,
    agree: Agree = float,
) -> Timed:
    """Time one program, as `timed_in_turn` does."""
    (found,) = timed_in_turn([(run, inputs)], seconds, least_rounds, agree)
    return found


def timed_in_turn(
    tasks: Sequence[Task], seconds: float, least_rounds: int = 3, agree: Agree = float
) -> tuple[Timed, ...]:
    """Time each task, over at least so many seconds and so many rounds of each.

    The first two runs of a task do not count: one compiles, and one allocates. Tasks take turns, so
    that a slow spell of the machine slows all of them. A task that has enough rounds leaves. With
    `agree`, workers begin together, the slowest counts, and all make the same rounds.
    """
    for run, inputs in tasks:
        for _ in range(2):
            jax.block_until_ready((inputs, run(inputs[0])))
    times: list[list[float]] = [[] for _ in tasks]
    used = [0.0 for _ in tasks]
    left = list(range(len(tasks)))
    while left:
        for i in tuple(left):
            run, inputs = tasks[i]
            value = inputs[len(times[i]) % len(inputs)]
            begun = time.perf_counter()
            used[i] = agree(used[i])
            if used[i] >= seconds and len(times[i]) >= least_rounds:
                left.remove(i)
                continue
            start = time.perf_counter()
            result = jax.block_until_ready(run(value))
            elapsed = agree(time.perf_counter() - start)
            del result  # before the next one needs the memory, and not within its time
            times[i].append(elapsed)
            # `agree` counts too: over a slow link it may take far longer than the task.
            used[i] += time.perf_counter() - begun
    return tuple(Timed(statistics.median(t), min(t), len(t)) for t in times)


def agreement(mesh: Mesh, axis_name: AxisName) -> Agree:
    """The `agree` of a mesh; one process alone has nobody to ask."""
    if jax.process_count() == 1:
        return float
    workers = _axes.mesh_size(mesh, axis_name)
    program = jax.jit(
        jax.shard_map(
            lambda x: lax.pmax(x, axis_name), mesh=mesh, in_specs=P(axis_name), out_specs=P(),
            check_vma=False,
        )
    )  # fmt: skip

    def agree(value: float) -> float:
        return float(program(full(mesh, axis_name, workers, value)).addressable_shards[0].data[0])

    return agree


def full(mesh: Mesh, axis_name: AxisName, size: int, value: float) -> jax.Array:
    """A vector of one value, cut along the axis; each process makes its own part."""
    return jax.make_array_from_callback(
        (size,),
        NamedSharding(mesh, P(axis_name)),
        lambda index: np.full(size, value, np.float32)[index],
    )
