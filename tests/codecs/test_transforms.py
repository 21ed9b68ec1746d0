"""The Fourier transform against its definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import floats, sample, values
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from messages import compress, decompress

import fftgrad as fg
from fftgrad.codecs import _chain, _transforms

LENGTHS = [1, 2, 3, 7, 16, 17, 100, 127, 1009]


FFTS = list(itertools.product(LENGTHS, [2, 4, 64, None], [False, True]))


@pytest.mark.parametrize(
    ("n", "block", "half"), sample(FFTS, lambda row: {row[:2], (row[1], row[2])})
)
def test_fft_is_the_oracle(n, block, half):
    x = values((n,))
    codec = fg.Fft(block=block, half=half)
    z = compress(codec, jnp.asarray(x)).main
    expected = reference.fft(x, block, half)
    np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-5 * np.abs(x).max())
    back = decompress(codec, fg.Payload(jnp.asarray(expected, jnp.complex64)), jnp.asarray(x))
    np.testing.assert_allclose(
        back, reference.inverse_fft(expected, n, block), rtol=1e-5, atol=1e-5 * np.abs(x).max()
    )


@given(
    x=hnp.arrays(np.float32, 100, elements=floats(10)),
    block=st.sampled_from([8, 64, None]),
)
def test_fft_is_an_isometry_that_can_be_undone(x, block):
    z = compress(fg.Fft(block=block), x).main
    energy = float(np.sum(np.square(x, dtype=np.float64)))
    np.testing.assert_allclose(float(jnp.sum(jnp.abs(z) ** 2)), energy, rtol=1e-4, atol=1e-6)
    back = decompress(fg.Fft(block=block), fg.Payload(z), x)
    np.testing.assert_allclose(back, x, atol=1e-5 * max(1e-6, np.abs(x).max()))


def test_a_prime_length_is_padded_to_small_factors():
    n = 1_000_003
    (m,) = jax.eval_shape(
        lambda x: fg.compress(fg.Fft(block=None), x), jax.ShapeDtypeStruct((n,), "float32")
    ).main.shape
    assert 2 * m == reference.smooth_even(n) == 1_000_188


def test_half_saturates_instead_of_overflowing():
    x = jnp.array([1e6, -1e6, 1.0, 0.0])
    y = decompress(fg.Fft(half=True), compress(fg.Fft(half=True), x), x)
    np.testing.assert_allclose(y, [65504.0, -65504.0, 1.0, 0.0], atol=0.05)
    assert fg.Fft(half=True).compress(x, (), fg.Step()).overflow == 2


@pytest.mark.parametrize("block", [2, 16, 64])
@pytest.mark.parametrize("n", [1, 7, 64, 1009])
def test_dct_is_the_oracle(n, block):
    x = jnp.asarray(values((n,)))
    y = compress(fg.Dct(block=block), x).main
    np.testing.assert_allclose(y, reference.dct(x, block), atol=1e-5 * np.abs(x).max())
    back = decompress(fg.Dct(block=block), fg.Payload(y), x)
    np.testing.assert_allclose(back, x, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("block", [2, 16, 64, 128, 8192])
@pytest.mark.parametrize("n", [1, 7, 64, 1009])
def test_hadamard_is_the_oracle(n, block):
    x = jnp.asarray(values((n,)))
    y = compress(fg.Hadamard(block=block, signs=False), x).main
    np.testing.assert_allclose(y, reference.hadamard(x, block), atol=1e-5 * np.abs(x).max())


@given(x=hnp.arrays(np.float32, 100, elements=floats(10)), seed=st.integers(0, 100))
def test_hadamard_is_an_isometry_that_its_signs_undo(x, seed):
    codec, step = fg.Hadamard(block=64), fg.Step.of(seed)
    y = compress(codec, x, step=step).main
    energy = float(np.sum(np.square(x, dtype=np.float64)))
    np.testing.assert_allclose(float(jnp.sum(y**2)), energy, rtol=1e-4, atol=1e-6)
    back = decompress(codec, fg.Payload(y), x, step=step)
    np.testing.assert_allclose(back, x, atol=1e-5 * max(1e-6, np.abs(x).max()))


def test_random_signs_spread_a_constant_and_change_by_step():
    x = jnp.ones(4096)
    plain = compress(fg.Hadamard(block=4096, signs=False), x).main
    assert float(jnp.max(jnp.abs(plain))) == pytest.approx(64)
    first, second = (compress(fg.Hadamard(block=4096), x, step=fg.Step.of(s)).main for s in (0, 1))
    assert float(jnp.max(jnp.abs(first))) < 6
    assert abs(float(jnp.vdot(first, second))) < 5 * 64


@pytest.mark.parametrize(
    "codec", [fg.Fft(block=16), fg.Dct(block=16), fg.Hadamard(16, signs=False)]
)
def test_pieces_change_nothing(codec, monkeypatch):
    x = jnp.asarray(values((1009,)))
    whole = fg.compress(codec, x).main
    monkeypatch.setattr(_transforms, "CHUNK", 80)
    text = str(jax.make_jaxpr(lambda x: fg.compress(codec, x).main)(x))
    assert "scan" in text
    np.testing.assert_allclose(fg.compress(codec, x).main, whole, atol=1e-6)
    np.testing.assert_allclose(fg.decompress(codec, fg.Payload(whole), x), x, atol=1e-5)


def test_a_whole_vector_that_is_too_long_is_cut_evenly(monkeypatch):
    x, codec = jnp.asarray(values((1009,))), fg.Fft(block=None)
    monkeypatch.setattr(_transforms, "CHUNK", 300)
    z = fg.compress(codec, x).main
    assert z.shape == (4 * 256 // 2,)
    np.testing.assert_allclose(fg.decompress(codec, fg.Payload(z), x), x, atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    sample([fg.Fft(block=16), fg.Fft(block=128), fg.Dct(block=16)], lambda row: {type(row)}),
)
def test_a_few_coefficients_are_undone_at_their_blocks_alone(transform, monkeypatch):
    x = jnp.asarray(values((4099,)))
    codec = fg.chain(transform, fg.TopK(k=2), fg.RangeFloat(bits=8))
    exchange = fg.AllGather(codec)

    def both():
        def one(x):
            return fg.decompress(codec, fg.compress(codec, x), x)

        def mean(x):
            return exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data", fg.Step.of(0))).mean

        rows = jnp.stack([x, -2 * x[::-1]])
        return jax.jit(one)(x), jax.jit(jax.vmap(mean, axis_name="data"))(rows)[0]

    assert _chain.has_few_blocks(codec.stages, x)
    sparse = both()
    assert jnp.count_nonzero(sparse[0]) <= 2 * transform.block
    monkeypatch.setattr(_chain, "SPARSE", x.size)
    assert not _chain.has_few_blocks(codec.stages, x)
    for few, dense in zip(sparse, both(), strict=True):
        np.testing.assert_allclose(few, dense, rtol=1e-5, atol=1e-6 * np.abs(dense).max())


@pytest.mark.parametrize(
    "positions",
    [
        [0, 3, 9, 12],  # two in the first block, one in the last, which is cut short, one nowhere
        [0, 3, 12, 16],  # two that are nowhere, in blocks of their own
        [8, 12, 13, 20],
        [0, 1, 12, 400],  # one that is nowhere, and far
        [12, 16, 20, 24],  # all
    ],
)
def test_coefficients_of_one_block_are_added_together(positions):
    codec, x, positions = fg.Dct(block=4), jnp.arange(10.0), jnp.array(positions)
    y = jax.random.normal(jax.random.key(0), (4,))
    few = codec.at_blocks(fg.codecs.Sparse(positions, y), x, fg.Step())
    assert (jnp.diff(few.positions.ravel()) > 0).all()  # also of what is nowhere
    total = few.add_to(x, 1.0)
    dense = jnp.zeros(12).at[positions].set(y, mode="drop")
    expected = x + fg.decompress(codec, fg.Payload(dense), x)
    np.testing.assert_allclose(total, expected, atol=1e-6)
