"""Writes tests/goldens.npz anew: after a change of the wire, whose version must go up with it."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import goldens
import jax
import numpy as np

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)  # as in the tests
    np.savez_compressed(goldens.FILE, **goldens.make())
