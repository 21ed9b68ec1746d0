"""No two arrays of a state, or of it and the parameters, share a buffer: all may be donated."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import METHODS, SLOW
from parallel import AXIS

PARAMS = {"w": np.ones((10, 12), "f4"), "last": [np.ones(9, "f4"), np.float32(2.0)]}
TYPICAL = {"diloco", "beer", "choco_sgd", "sharded", "feedback_adam", "scale_by_one_bit_adam"}


@pytest.mark.parametrize("way", ["alone", "vmap"])
@pytest.mark.parametrize(
    "name", [name if name in TYPICAL else pytest.param(name, marks=SLOW) for name in METHODS]
)
def test_nothing_shares_a_buffer(name, way):
    tx = METHODS[name](AXIS)
    rows = jax.tree.map(lambda leaf: np.stack([leaf] * 4), PARAMS)
    params, init = (PARAMS, tx.init) if way == "alone" else (rows, jax.vmap(tx.init))
    params = jax.tree.map(jnp.array, params)
    leaves = jax.tree.leaves_with_path({"params": params, "state": init(params)})
    shared = collections.defaultdict(list)
    for path, leaf in leaves:
        shared[leaf.unsafe_buffer_pointer()].append(jax.tree_util.keystr(path))
    assert [paths for paths in shared.values() if len(paths) > 1] == []
