"""Optimizers on leaves of 16 bits: what they keep, and what they compute with, is float32."""

import jax
import numpy as np
import pytest
from cases import values
from parallel import AXIS, everywhere

import fftgrad as fg

WORKERS, DENSE = 4, fg.AllGather(fg.TopK(1.0))
MAKE = {
    "feedback_adam": lambda: fg.optimizers.feedback_adam(0.1, DENSE, axis_name=AXIS),
    "feedback_muon": lambda: fg.optimizers.feedback_muon(0.1, DENSE, axis_name=AXIS),
    "scale_by_one_bit_adam": lambda: fg.methods.scale_by_one_bit_adam(5, WORKERS, axis_name=AXIS),
    "scale_by_dion": lambda: fg.methods.scale_by_dion(rank=2, dense=("b",), axis_name=AXIS),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MAKE)
def test_narrow_leaves_move_as_wide_ones(name, dtype):
    """Of gradients whose squares float16 does not have, and with zeros among them."""
    tx = MAKE[name]()
    grads = {"w": values((WORKERS, 8, 6)) * 1e-4, "b": values((WORKERS, 9), seed=1) * 1e-4}
    for leaf in grads.values():
        leaf[:, 2] = 0
    grads = {k: g.astype(dtype) for k, g in grads.items()}

    def steps(grads):
        state, found = tx.init(grads), []
        for size in (1.0, 0.5, 2.0):
            moves, state = tx.update({k: g * size for k, g in grads.items()}, state, grads)
            found.append(moves)
        return found

    run = everywhere("vmap", steps, WORKERS)
    wide = jax.tree.map(lambda g: g.astype("float32"), grads)
    narrow, wide = jax.device_get((run(grads), run(wide)))
    for one, other in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert one.dtype == dtype
        expected = other.astype(dtype).astype("float32")
        np.testing.assert_allclose(one.astype("float32"), expected, rtol=1e-2, atol=1e-7)
