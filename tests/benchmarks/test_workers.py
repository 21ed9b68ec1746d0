"""Simulated workers: rows of one device's arrays, which take half of the time, train as devices."""

import jax
import numpy as np
import pytest


@pytest.mark.parametrize("name", ["4 local steps of Adam, 25x"])
def test_workers_as_rows_train_as_devices_do(imported, name):
    program, task = imported("program"), imported("tasks").TASKS["lm"](True)
    method = imported("methods").BY_NAME[name]
    mesh, ends = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), []
    for devices in (True, False):
        made = program.Program(task, method, 5, mesh, devices)
        at, batches = made.fresh(task.params(0)), task.batches(0, 4)
        for _ in range(5):
            at, losses = made.step(at, next(batches), 0.01)
        assert losses.shape == (4,)
        ends.append((made.common(at), losses))
    assert jax.tree.structure(ends[0]) == jax.tree.structure(ends[1])
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
