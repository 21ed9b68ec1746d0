"""Which codec each leaf gets, in one collective, and that no leaf goes without."""

import jax
import numpy as np
from cases import gradients
from parallel import AXIS, train_step

import fftgrad as fg

CODEC = fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=6))
LIKE = {
    "dense": {
        "kernel": jax.ShapeDtypeStruct((10, 20), "float32"),
        "bias": jax.ShapeDtypeStruct((20,), "float32"),
    },
    "head": {"kernel": jax.ShapeDtypeStruct((20, 5), "float32")},
    "norm": jax.ShapeDtypeStruct((12,), "float32"),
}


def two_parts(_, leaf):
    return "large" if len(leaf.shape) > 1 else "small"


def rule(name, _):
    return CODEC if name == "large" else fg.codecs.Identity()


def test_all_parts_travel_in_one_collective():
    method = fg.Recipe(fg.AllGather(rule), fg.ErrorFeedback(), fg.Bucketing(two_parts))
    tx = fg.compressed_pmean(method, axis_name=AXIS)
    init, update = train_step(tx, 4, like=LIKE)
    grads = gradients(LIKE, 4)
    state = init(jax.tree.map(lambda s: np.zeros(s.shape, np.float32), LIKE))
    update = update.lower(grads, state).compile()
    (only,) = fg.audit(update)
    assert only.bytes == fg.wire_bytes(method, LIKE)
    mean, _ = update(grads, state)
    for dense in (lambda t: t["dense"]["bias"], lambda t: t["norm"]):
        np.testing.assert_allclose(dense(mean), np.asarray(dense(grads)).mean(0), rtol=1e-5)
    assert np.count_nonzero(mean["dense"]["kernel"]) <= 4 * 20
