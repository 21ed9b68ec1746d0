"""What one of several processes measures: run by test_measured_together."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from processes import tell

import fftgrad as fg

SLEEPS = (0.02, 0.3)
"""What a step takes in each process."""

if __name__ == "__main__":
    coordinator, count, number = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(count), int(number), heartbeat_timeout_seconds=10)

    def step():
        time.sleep(SLEEPS[int(number)])
        return jnp.ones(3)

    devices = np.array(jax.devices())
    like, rows = jax.ShapeDtypeStruct((5000,), "float32"), [
        fg.planning.Candidate("dense", fg.AllReduce(), dense=True),
        fg.planning.Candidate("signs", fg.Recipe(fg.AllGather(fg.Sign()), fg.ErrorFeedback())),
    ]  # fmt: skip
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    flat = fg.planning.measure(like, step=step, mesh=mesh, rows=rows, buckets=2, seconds=0.05)
    two = Mesh(devices.reshape(2, 2), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)
    pairs = fg.planning.measure(
        like, step=step, mesh=two, fast=(2, "50GB/s"), rows=rows[:1], seconds=0.05, link="1gbit"
    )
    link = fg.planning.measure_link(two, "slow", seconds=0.05)
    tell(json.dumps([repr(found) for found in (flat, pairs, link)] + [flat.step]))
    jax.distributed.shutdown()
