"""Writes tests/goldens.npz and tests/golden_bytes anew.

After a change of the wire, whose version must go up with it.
"""

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", True)  # as in the tests

import goldens  # noqa: E402  (it makes arrays)

if __name__ == "__main__":
    np.savez_compressed(goldens.FILE, **goldens.make())
    for name in goldens.STORED:
        (goldens.BYTES / name).write_bytes(goldens.stored(name))
