"""Geometric levels between both ends: an oracle, the bound of every value, and what is exact."""

import functools

import jax
import numpy as np
import pytest
from cases import EVERY_CASE, floats, values
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fftgrad as fg
from fftgrad.codecs._levels import _centroids

N = 60
BITS = [*range(2, 6), 8, 12, 16]


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x):
    return fg.decompress(codec, fg.compress(codec, x), x)


def relative(codec, x):
    x = np.asarray(x)
    error = np.abs(np.asarray(round_trip(codec, x)) - x).astype(np.float64)
    return error / np.where(x == 0, 1, np.abs(x))


def oracle(x, bits):
    """The cells of a real vector, in double precision."""
    x = np.asarray(x, np.float64)
    size = np.abs(x)
    cells = 2 ** (bits - 1) - (size == 0).any()
    low, high = size[size > 0].min(), size.max()
    ratio = (high / low) ** (1 / cells)
    place = np.log(np.where(size > 0, size, low) / low) / max(np.log(ratio), 1e-300)
    cell = np.clip(np.floor(place), 0, cells - 1)
    point = low * ratio**cell * 2 * ratio / (ratio + 1)
    # On a border the next cell will do as well.
    border = np.abs(place - np.round(place)) < 1e-3
    return np.sign(x) * point, border


@EVERY_CASE
@pytest.mark.parametrize("bits", BITS)
def test_it_is_the_numpy_oracle(bits):
    for zeros in (0, 7):
        x = values((400,))
        x = x[np.argsort(-np.abs(x))[:N]]
        x[:zeros] = 0
        expected, border = oracle(x, bits)
        found = np.asarray(round_trip(fg.LogQuantizer(bits), x))
        np.testing.assert_allclose(found[~border], expected[~border], rtol=2e-4)
        assert border.sum() < (30 if bits > 8 else 10)


@functools.partial(jax.jit, static_argnums=0)
def round_complex(codec, x):
    """Behind a transform, which is what makes complex values."""
    return codec.decompress(codec.compress(x, (), fg.Step()).payload, x, fg.Step())


@given(
    parts=hnp.arrays(np.float32, (2, N), elements=floats(60)), bits=st.sampled_from([2, 3, 4, 8])
)
def test_no_complex_value_is_worse_than_not_sent(parts, bits):
    z = (parts[0] + 1j * parts[1]).astype(np.complex64)
    z[np.abs(z) < 1e-15] = 0
    found = np.asarray(round_complex(fg.LogQuantizer(bits), z))
    size = np.abs(z)
    assert (np.abs(found - z)[size > 0] < size[size > 0] * (1 + 1e-5)).all()
    assert (found[size == 0] == 0).all()


def test_moduli_and_angles_have_cells_of_their_own():
    angle, bits = np.linspace(-np.pi, np.pi, 1001), 5
    z = (np.geomspace(1, 50, 1001) * np.exp(1j * angle)).astype(np.complex64)
    found = np.asarray(round_complex(fg.LogQuantizer(bits), z))
    turned = np.angle(found * np.conj(z))
    assert np.abs(turned).max() <= np.pi / 2**bits + 1e-5
    assert len(np.unique(np.round(np.abs(found), 4))) == 2**bits


def of_sixty(*x):
    """These values again and again: all tests of a width share one program."""
    return np.resize(np.array(x, np.float32), N)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_all_of_one_size_is_exact(bits):
    x = of_sixty(3.0, -3.0, 0.0, 3.0)
    np.testing.assert_allclose(round_trip(fg.LogQuantizer(bits), x), x, rtol=1e-5)
    assert (np.asarray(round_trip(fg.LogQuantizer(bits), of_sixty(0.0))) == 0).all()
    least = of_sixty(2.0**-126, -(2.0**-126))
    np.testing.assert_array_equal(round_trip(fg.LogQuantizer(bits), least), least)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_least_of_values_far_apart_is_better_than_not_sent(bits):
    """A cell as wide as 2^200 is decoded to a bit less than twice its lower end."""
    for zeros in ([], [0.0]):
        error = relative(fg.LogQuantizer(bits), of_sixty(2.0**-100, -(2.0**-100), 2.0**100, *zeros))
        assert error.max() <= 1
        assert error[:2].max() <= 1 - 2.0**-15


# LloydMax: its values serve a normal distribution best

# As in the tables of EDEN's authors.
LARGEST = {1: 0.7979, 2: 1.5104, 3: 2.1519, 4: 2.7326, 5: 3.2607, 6: 3.7441}


@pytest.mark.parametrize("bits", LARGEST)
def test_each_is_the_mean_of_what_is_nearest_to_it(bits):
    centroids = _centroids(bits)
    assert len(centroids) == 2**bits
    np.testing.assert_allclose(centroids, -centroids[::-1], atol=1e-10)
    assert centroids[-1] == pytest.approx(LARGEST[bits], abs=1e-4)
    x = np.linspace(-9, 9, 1_000_001)
    density = np.exp(-x * x / 2)
    nearest = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, x)
    means = np.bincount(nearest, density * x) / np.bincount(nearest, density)
    np.testing.assert_allclose(means, centroids, atol=1e-4)
