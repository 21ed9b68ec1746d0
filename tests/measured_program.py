"""What one of several processes measures: run by tests/planning/test_link.py."""

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from processes import tell

import fftgrad as fg

if __name__ == "__main__":
    coordinator, count, number = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(count), int(number), heartbeat_timeout_seconds=10)
    devices = np.array(jax.devices())
    one = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    two = Mesh(devices.reshape(2, 2), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)
    links = [fg.planning.measure_link(mesh, axis, seconds=0.05)
             for mesh, axis in ((one, "data"), (two, "slow"))]  # fmt: skip
    tell(json.dumps([repr(link) for link in links]))
    jax.distributed.shutdown()
