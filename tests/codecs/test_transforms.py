"""The Fourier transform against its definition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import sample, values
from messages import compress, decompress, gathered

import fftgrad as fg
from fftgrad.codecs import _chain, _transforms

LENGTHS = [1, 2, 3, 7, 16, 17, 100, 127, 1009]


FFTS = list(itertools.product(LENGTHS, [2, 4, 64, None], [False, True]))


@pytest.mark.parametrize(
    ("n", "block", "half"), sample(FFTS, lambda row: {row[:2], (row[1], row[2])})
)
def test_fft_is_the_oracle(n, block, half):
    x, codec = values((n,)), fg.Fft(block=block, half=half)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5 * np.abs(x).max())
    expected = reference.fft(x, block, half)
    close(compress(codec, x).main, expected)
    back = decompress(codec, fg.codecs.Payload(expected.astype(np.complex64)), x)
    close(back, reference.inverse_fft(expected, n, block))


def test_a_prime_length_is_padded_to_small_factors():
    n = 1_000_003
    (m,) = jax.eval_shape(
        lambda x: fg.compress(fg.Fft(block=None), x), jax.ShapeDtypeStruct((n,), "float32")
    ).main.shape
    assert 2 * m == reference.smooth_even(n) == 1_000_188


def test_half_saturates_instead_of_overflowing():
    x = np.array([1e6, -1e6, 1.0, 0.0], np.float32)
    y = decompress(fg.Fft(half=True), compress(fg.Fft(half=True), x), x)
    np.testing.assert_allclose(y, [65504.0, -65504.0, 1.0, 0.0], atol=0.05)


@pytest.mark.parametrize("block", [2, 16, 64, 128, 8192])
@pytest.mark.parametrize("n", [1, 7, 64, 1009])
def test_dct_and_hadamard_are_the_oracle(n, block):
    x, rotation = values((n,)), fg.Hadamard(block=block, signs=False)
    for codec, oracle in (
        (fg.Dct(block=min(block, 1024)), reference.dct),
        (rotation, reference.hadamard),
    ):
        y = compress(codec, x).main
        np.testing.assert_allclose(y, oracle(x, block), atol=1e-5 * np.abs(x).max())
        back = decompress(codec, fg.codecs.Payload(y), x)
        np.testing.assert_allclose(back, x, atol=1e-5 * np.abs(x).max())


def test_random_signs_spread_a_constant_and_change_by_step():
    x = np.ones(4096, np.float32)
    plain = compress(fg.Hadamard(block=4096, signs=False), x).main
    assert np.max(np.abs(plain)) == pytest.approx(64)
    first, second = (compress(fg.Hadamard(block=4096), x, step=fg.Step.of(s)).main for s in (0, 1))
    assert np.max(np.abs(first)) < 6
    assert abs(np.vdot(first, second)) < 5 * 64


@pytest.mark.parametrize(
    "codec", [fg.Fft(block=16), fg.Dct(block=16), fg.Hadamard(16, signs=False)]
)
def test_pieces_change_nothing(codec, monkeypatch):
    x = values((1009,))

    def there_and_back(x):
        y = fg.compress(codec, x).main
        return y, fg.decompress(codec, fg.codecs.Payload(y), x)

    whole, _ = jax.jit(there_and_back)(x)
    monkeypatch.setattr(_transforms, "CHUNK", 80)
    in_pieces = jax.jit(lambda x: there_and_back(x)).trace(x)
    assert "scan" in str(in_pieces.jaxpr)
    found, back = in_pieces.lower().compile()(x)
    np.testing.assert_allclose(found, whole, atol=1e-6)
    np.testing.assert_allclose(back, x, atol=1e-5)


def test_a_whole_vector_that_is_too_long_is_cut_evenly(monkeypatch):
    x, codec = values((1009,)), fg.Fft(block=None)
    monkeypatch.setattr(_transforms, "CHUNK", 300)

    @jax.jit
    def there_and_back(x):
        z = fg.compress(codec, x).main
        assert z.shape == (4 * 256 // 2,)
        return fg.decompress(codec, fg.codecs.Payload(z), x)

    np.testing.assert_allclose(there_and_back(x), x, atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    sample([fg.Fft(block=16), fg.Fft(block=128), fg.Dct(block=16)], lambda row: {type(row)}),
)
def test_a_few_coefficients_are_undone_at_their_blocks_alone(transform, monkeypatch):
    x = values((4099,))
    rows = np.stack([x, -2 * x[::-1]])
    codec = fg.chain(transform, fg.TopK(k=2), fg.RangeFloat(bits=8))
    assert _chain.has_few_blocks(codec.stages, x)

    def run():  # traced anew
        return jax.jit(lambda rows: gathered.__wrapped__(codec, rows))(rows)

    sparse = run()
    assert np.count_nonzero(sparse[2][0]) <= 2 * transform.block
    monkeypatch.setattr(_chain, "SPARSE", x.size)
    assert not _chain.has_few_blocks(codec.stages, x)
    for few, dense in zip(sparse, run(), strict=True):
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
    codec, x, y = fg.Dct(block=4), np.arange(10, dtype=np.float32), values((4,))

    @jax.jit
    def added(x, y, positions):
        few = codec.at_blocks(fg.codecs.Sparse(positions, y), x, fg.Step())
        dense = jnp.zeros(12).at[positions].set(y, mode="drop")
        expected = x + fg.decompress(codec, fg.codecs.Payload(dense), x)
        return few.positions.ravel(), few.add_to(x, 1.0), expected

    places, total, expected = added(x, y, np.array(positions, np.int32))
    assert np.all(np.diff(places) > 0)  # also of what is nowhere
    np.testing.assert_allclose(total, expected, atol=1e-6)
