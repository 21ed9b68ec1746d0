"""What a candidate sends is traced once for all plans of it."""

import jax
import pytest

from fftgrad.advise import _plan

SENT = {}
"""By candidate, shapes and axes, from which alone it follows."""


@pytest.fixture(scope="module", autouse=True)
def _each_candidate_is_traced_once():
    trace = _plan._sent

    def sent(row, like, axes):
        shapes, structure = jax.tree.flatten(like)
        key = row, structure, tuple(leaf.shape for leaf in shapes), tuple(axes.items())
        if key not in SENT:
            SENT[key] = trace(row, like, axes)
        return SENT[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "_sent", sent)
        yield
