"""The usual candidates of some shapes are made once, and what each sends is traced once.

The figures of this machine are kept in a folder of the tests, as if a copy took as long here as on
the machine of the table.
"""

import jax
import pytest

from fftgrad.planning import _candidates, _devices, _plan

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


def same_machine():
    """The machine of the table."""
    table = _devices.load_table()
    rate = 8 * _devices.COPY_VALUES / table["copy_seconds"]
    return _devices.Device("same", "cpu", rate, 1.5e11, "2026-11-28")


@pytest.fixture(autouse=True)
def _this_machine_is_kept_in_a_folder_of_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_devices, "measured", same_machine)


@pytest.fixture(scope="module", autouse=True)
def _candidates_are_made_and_traced_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "_sent", remembered(_plan._sent))
        usual = remembered(_candidates.candidates)
        patch.setattr(_candidates, "candidates", usual)
        patch.setattr(_plan, "candidates", usual)
        yield
