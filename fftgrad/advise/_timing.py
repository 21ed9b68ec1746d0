"""How long programs take: medians over rounds, in which each has its turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Timed(NamedTuple):
    """What a run takes.

    Attributes:
      seconds: the median over the rounds.
      least: of the fastest round.
      most: of the slowest round.
      rounds: how many there were.
    """

    seconds: float
    least: float
    most: float
    rounds: int


class Task(NamedTuple):
    """Something to time.

    Attributes:
      run: a function of one input; what it returns is waited for.
      inputs: of one shape; each round takes the next one in turn.
    """

    run: Callable[[Any], Any]
    inputs: Sequence[Any]


Agree = Callable[[float], float]
"""Gives all workers the greatest of their numbers, when all have come that far."""


def timed(
    run: Callable[[Any], Any],
    inputs: Sequence[Any],
    seconds: float,
    least_rounds: int = 3,
    agree: Agree = float,
) -> Timed:
    """How long `run` takes, over at least so many seconds and so many rounds.

    Two runs before are not counted: the first compiles, and the second one finds the memory that
    all others will use. Workers that agree begin together, the slowest counts, and all make the
    same rounds.
    """
    (time_of_it,) = timed_in_turn([Task(run, inputs)], seconds, least_rounds, agree=agree)
    return time_of_it


def timed_in_turn(
    tasks: Sequence[Task],
    seconds: float,
    least_rounds: int = 3,
    tell: Callable[[float], object] | None = None,
    agree: Agree = float,
) -> tuple[Timed, ...]:
    """How long each task takes, over at least so many seconds and so many rounds of each.

    The seconds are those of the slowest worker, with what agreeing takes. All have their turn in a
    round, so that what slows the machine for a while slows all of them. A task that is done leaves
    the rounds. `tell` hears the seconds of each run.
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
            # With what agreeing takes, which over a slow link may be far more than the task.
            used[i] += time.perf_counter() - begun
            if tell:
                tell(elapsed)
    return tuple(Timed(statistics.median(t), min(t), max(t), len(t)) for t in times)
