"""The worked examples of CONTRIBUTING.md run as printed."""

import pathlib
import re
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

import fftgrad as fg

ROOT = pathlib.Path(__file__).parents[1]


def example(tmp_path, name):
    """The class of this name in a Python block of CONTRIBUTING.md."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (code,) = (code for code in codes if f"class {name}(" in code)
    file = tmp_path / "_example.py"
    file.write_text(code)
    return runpy.run_path(str(file))[name]


@pytest.fixture
def int8(tmp_path):
    return example(tmp_path, "Int8")


def test_the_example_is_a_codec(int8):
    x = jnp.asarray(values((1009,)))
    y = fg.decompress(int8(), fg.compress(int8(), x), x)
    assert fg.wire_bytes(int8(), x) == 4 + 1012 + 4
    inside = np.abs(x) <= 15 * np.mean(np.abs(x))
    assert np.max(np.abs(y - x)[inside]) <= np.mean(np.abs(x)) / 16 * 1.01


def test_the_example_passes_the_checks(int8):
    fg.testing.check_codec(int8(), sizes=(1, 90, 5_000))


def test_the_example_refuses_with_the_remedy(int8):
    with pytest.raises(ValueError, match="use steps=8"):
        int8(steps=0)


def test_the_example_keeps_the_largest_values_finite(int8):
    for n in (6, 90, 1009):
        x = jnp.full(n, jnp.finfo("float32").max)
        assert np.all(np.isfinite(fg.decompress(int8(), fg.compress(int8(), x), x)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_example_hides_nothing(int8, bad):
    x = jnp.asarray(values((65_537,))).at[17].set(bad)
    y = fg.decompress(int8(), fg.compress(int8(), x), x)
    assert not np.all(np.isfinite(y))


def test_the_exchange_passes_the_checks(tmp_path):
    fg.testing.check_exchange(example(tmp_path, "HalfGather")())
