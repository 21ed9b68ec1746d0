"""The usual candidates of some shapes are made once, and what each sends is traced once."""

import jax
import pytest

from fftgrad.planning import _candidates, _plan

KNOWN = {}
"""By function, shapes and what else it follows from."""


def remembered(function):
    """A function of shapes and of values that are compared, which is called once for each."""

    def call(*arguments):
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple(
            (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves
        )
        key = function, structure, shapes
        if key not in KNOWN:
            KNOWN[key] = function(*arguments)
        return KNOWN[key]

    return call


@pytest.fixture(scope="module", autouse=True)
def _candidates_are_made_and_traced_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "_sent", remembered(_plan._sent))
        usual = remembered(_candidates.candidates)
        patch.setattr(_candidates, "candidates", usual)
        patch.setattr(_plan, "candidates", usual)
        yield
