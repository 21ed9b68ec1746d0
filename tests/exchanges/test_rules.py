"""Which codec each leaf gets, in one collective, and that no leaf goes without."""

import jax
import numpy as np
import pytest
from cases import gradients
from parallel import AXIS, train_step

import fftgrad as fg
from fftgrad.ops._shapes import by_path

CODEC = fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=6))
LIKE = {
    "dense": {
        "kernel": jax.ShapeDtypeStruct((10, 20), "float32"),
        "bias": jax.ShapeDtypeStruct((20,), "float32"),
    },
    "head": {"kernel": jax.ShapeDtypeStruct((20, 5), "float32")},
    "norm": jax.ShapeDtypeStruct((12,), "float32"),
}
RULE = fg.SmallDense(CODEC)


def test_leaves_of_one_axis_are_dense():
    of = {name: RULE(RULE.scope(name, leaf), leaf) for name, leaf in by_path(LIKE).items()}
    assert {name for name, codec in of.items() if codec == fg.codecs.Identity()} == {
        "dense/bias",
        "norm",
    }


def test_all_parts_travel_in_one_collective():
    tx = fg.compressed_pmean(fg.AllGather(RULE), fg.ErrorFeedback(), axis_name=AXIS)
    init, update = train_step(tx, 4, like=LIKE)
    grads = gradients(LIKE, 4)
    state = init(jax.tree.map(lambda s: np.zeros(s.shape, np.float32), LIKE))
    update = update.lower(grads, state).compile()
    (only,) = fg.audit(update)
    assert only.bytes == fg.wire_bytes(fg.AllGather(RULE), LIKE)
    mean, _ = update(grads, state)
    for dense in (lambda t: t["dense"]["bias"], lambda t: t["norm"]):
        np.testing.assert_allclose(dense(mean), np.asarray(dense(grads)).mean(0), rtol=1e-5)
    assert np.count_nonzero(mean["dense"]["kernel"]) <= 4 * 20


@pytest.mark.parametrize("scope", ["model", "leaf"])
def test_another_scope_is_refused(scope):
    """Or the one vector of the model would pass for a leaf with one axis."""
    with pytest.raises(ValueError, match="leave the bucketing's scope out"):
        fg.wire_bytes(fg.AllGather(RULE), LIKE, fg.Bucketing(scope))
