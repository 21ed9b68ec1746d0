"""Top-k: exactly k, the right ones, ties to the lowest index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import floats, values
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fftgrad as fg
from fftgrad.packing import _indices

N = 200


compiled = jax.jit(lambda x, k: fg.TopK(k=k).compress(x, None), static_argnums=1)


def positions(x, k):
    """Which positions the payload really carries, decoded from it."""
    payload = compiled(jnp.asarray(x), k)
    if k == x.size:
        assert payload.side == ()
        return np.arange(k)
    found = _indices.decode(payload.side, k, x.size)
    np.testing.assert_array_equal(payload.main, np.asarray(x)[np.asarray(found)])
    return np.asarray(found)


ADVERSARIAL = {
    "constant": np.full(N, -2.5, np.float32),
    "zero": np.zeros(N, np.float32),
    "one-hot": np.eye(1, N, 131, dtype=np.float32)[0],
    "ascending": np.arange(N, dtype=np.float32),
    "descending": np.arange(N, dtype=np.float32)[::-1].copy(),
    "period 7": np.tile(np.arange(7, dtype=np.float32), 29)[:N],
    "period 32": np.tile(np.arange(32, dtype=np.float32), 7)[:N],
    "two values": np.where(np.arange(N) % 3, 1.0, -2.0).astype(np.float32),
    "few nonzero": np.where(np.arange(N) % 50, 0.0, 1.0).astype(np.float32),
    "dynamic range": np.float32(2.0) ** np.linspace(-120, 120, N).astype(np.float32),
    "signed zero": np.where(np.arange(N) % 2, -0.0, 0.0).astype(np.float32),
    "heavy tail": values((N,)),
}


@pytest.mark.parametrize("k", [1, 2, 19, 100, 199, 200])
@pytest.mark.parametrize("x", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_adversarial_inputs(x, k):
    np.testing.assert_array_equal(positions(x, k), reference.top_k(x, k))


@given(
    x=hnp.arrays(np.float32, N, elements=floats(127)),
    k=st.sampled_from([1, 7, 60, 150]),
)
def test_any_floats(x, k):
    payload = compiled(x, k)
    found = _indices.decode(payload.side, k, N)
    np.testing.assert_array_equal(found, reference.top_k(x, k))


@given(
    x=hnp.arrays(np.float32, N, elements=st.sampled_from([0.0, 1.0, -1.0, 2.0])),
    k=st.sampled_from([1, 7, 60, 150]),
)
def test_ties_go_to_the_lowest_index(x, k):
    np.testing.assert_array_equal(_indices.decode(compiled(x, k).side, k, N), reference.top_k(x, k))


@given(
    x=hnp.arrays(np.float32, (2, N), elements=floats(126)),
    k=st.sampled_from([1, 7, 60]),
)
def test_complex_by_modulus(x, k):
    z = x[0] + 1j * x[1]
    found = np.asarray(_indices.decode(compiled(z.astype(np.complex64), k).side, k, N))
    assert np.all(np.diff(found) > 0)
    modulus = np.abs(z.astype(np.complex128))
    least_kept = modulus[found].min()
    most_dropped = np.delete(modulus, found).max()
    # Two roundings of the energy, and the floor below which moduli count as equal.
    assert least_kept >= most_dropped * (1 - 1e-6) - 1e-18 * modulus.max()


def test_nan_is_kept_and_seen():
    x = jnp.asarray(values((N,))).at[77].set(jnp.nan)
    assert 77 in positions(x, 1)
    z = jax.lax.complex(x, x)
    assert 77 in positions(z, 1)


@pytest.mark.parametrize("n", [10, 97, 100, 1000])
@pytest.mark.parametrize("fraction", [0.01, 0.07, 0.1, 0.15, 0.5, 1.0])
def test_k_is_the_ceiling_of_the_share(fraction, n):
    payload = jax.eval_shape(fg.TopK(fraction=fraction).compress, jnp.ones(n), None)
    assert payload.main.size == reference.kept(fraction, n)
    assert payload.main.size - 1 < fraction * n + 1e-6


@given(x=hnp.arrays(np.float32, N, elements=floats(50)))
def test_contraction(x):
    codec = fg.TopK(k=40)
    y = np.asarray(fg.decompress(codec, compiled(x, 40), jnp.asarray(x)), np.float64)
    energy = np.sum(np.square(x, dtype=np.float64))
    assert np.sum((x - y) ** 2) <= (1 - 40 / N) * energy * (1 + 1e-6)


def test_k_beyond_n_keeps_all_and_sends_no_index():
    payload = fg.compress(fg.TopK(k=500), jnp.arange(5.0))
    np.testing.assert_array_equal(payload.main, jnp.arange(5.0))
    assert payload.side == ()
