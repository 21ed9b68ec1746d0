"""The values of `LloydMax` are those that serve a normal distribution best."""

import numpy as np
import pytest

from fftgrad.codecs._levels import _centroids

# As in the tables of EDEN's authors.
LARGEST = {1: 0.7979, 2: 1.5104, 3: 2.1519, 4: 2.7326, 5: 3.2607, 6: 3.7441}


@pytest.mark.parametrize("bits", LARGEST)
def test_each_is_the_mean_of_what_is_nearest_to_it(bits):
    values = _centroids(bits)
    assert len(values) == 2**bits
    np.testing.assert_allclose(values, -values[::-1], atol=1e-10)
    assert values[-1] == pytest.approx(LARGEST[bits], abs=1e-4)
    x = np.linspace(-9, 9, 1_000_001)
    density = np.exp(-x * x / 2)
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, x)
    means = np.bincount(nearest, density * x) / np.bincount(nearest, density)
    np.testing.assert_allclose(means, values, atol=1e-4)
