"""Buffers and results are what they were: old payloads can be read, and a refactoring shows."""

import goldens
import messages
import numpy as np
import pytest
from cases import CODECS, EVERY_CASE, EXCHANGES, METHODS, one_of_each, sample

GOLDEN = np.load(goldens.FILE)


def test_the_file_holds_every_row_of_the_table_and_no_other():
    assert set(GOLDEN) == set(goldens.makers()), "run python tests/make_goldens.py"


@EVERY_CASE
@pytest.mark.parametrize("name", CODECS)
def test_a_buffer_is_what_it_was_and_an_old_one_decodes_to_what_it_did(name):
    old = GOLDEN[f"words {name}"]
    finite, decoded = messages.receive(CODECS[name], old)
    assert finite
    np.testing.assert_allclose(decoded, GOLDEN[f"values {name}"], rtol=1e-5, atol=1e-5)
    words, _ = goldens.buffer(name)
    assert words.shape == old.shape
    if "float" in name or name in ("identity", "top-k", "top-k one", "sign"):
        same = np.mean(words == old)
        assert same >= 0.97, same  # another machine may round a few values elsewhere


def close(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    return np.mean(np.isclose(new, old, rtol=1e-3, atol=1e-4 * np.abs(old).max()))


@pytest.mark.parametrize("name", sample(METHODS, others=pytest.mark.full))
def test_a_method_does_what_it_did(name):
    assert close(goldens.updates(name), GOLDEN[f"updates {name}"]) >= 0.97


@pytest.mark.parametrize("name", one_of_each(EXCHANGES))
def test_an_exchange_does_what_it_did(name):
    assert close(goldens.means(name), GOLDEN[f"means {name}"]) >= 0.97
