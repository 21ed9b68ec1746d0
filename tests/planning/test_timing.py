"""What is timed is what was asked for: once compiled, to the end."""

import jax
import jax.numpy as jnp
import pytest
from cases import values

from fftgrad.planning import _timing
from fftgrad.planning._timing import Timed, timed


class Clock:
    """A clock that only work moves on."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_timing, "time", clock)
    return clock


def test_the_median_is_that_of_the_inputs_in_turn(clock):
    assert timed(clock.work, [1.0, 8.0, 32.0, 2.0], seconds=43.0) == Timed(5.0, 1.0, 4)


@pytest.mark.parametrize(("seconds", "least", "rounds"), [(0.0, 1, 1), (0.0, 7, 7), (8.5, 3, 5)])
def test_it_goes_on_until_both_are_enough(clock, seconds, least, rounds):
    assert timed(clock.work, [2.0], seconds, least) == Timed(2.0, 2.0, rounds)


def test_the_slowest_worker_counts_and_all_begin_together(clock):
    asked = []

    def agree(value):
        asked.append(value)
        return max(value, 3.0)

    found = timed(clock.work, [1.0, 5.0, 2.0], 0.0, 3, agree)
    # In turn what each has used, which is enough or not for all alike, and a time.
    assert asked == [0.0, 1.0, 4.0, 5.0, 9.0, 2.0, 11.0]
    assert found == Timed(3.0, 3.0, 3)


def test_what_agreeing_takes_counts(clock):
    """Over a link of a second, tasks of a millisecond would make a thousand rounds else."""

    def agree(value):
        clock.work(4.0)
        return value

    assert timed(clock.work, [1.0], 20.0, 1, agree) == Timed(1.0, 1.0, 3)


def test_compiling_is_not_timed_and_the_result_is_waited_for():
    traced = []

    @jax.jit
    def power(x):
        traced.append(x.shape)
        return jax.lax.fori_loop(0, 64, lambda _, y: jnp.tanh(y @ x), x)

    few, many = (
        timed(power, [jnp.asarray(values((n, n), seed)) for seed in range(3)], 0.0, 5)
        for n in (8, 256)
    )
    assert traced == [(8, 8), (256, 256)]
    assert many.least > few.least  # 32,768 times the work
