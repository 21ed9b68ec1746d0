"""Top-k: exactly k, the right ones, ties to the lowest index."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import EVERY_CASE, floats, values
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from parallel import everywhere
from stepwise import once

import fftgrad as fg
from fftgrad.ops import _platform, _positions, _selection

N, STEP = 200, fg.Step()


compiled = jax.jit(lambda x, k: fg.TopK(k=k).compress(x, (), fg.Step()).payload, static_argnums=1)
decode = jax.jit(_positions.decode, static_argnums=(1, 2))


def positions(x, k):
    """Which positions the payload really carries, decoded from it."""
    payload = compiled(x, k)
    if k == x.size:
        assert payload.side == ()
        return np.arange(k)
    found = decode(payload.side, k, x.size)
    np.testing.assert_array_equal(payload.main, np.asarray(x)[np.asarray(found)])
    return np.asarray(found)


PERIODS = 2, 7, 32, 128, 1000, 1 << 15


def hard(n):
    """Vectors with ties, zeros, few values, or values of any size."""
    at, rng = np.arange(n), np.random.default_rng(0)
    found = {
        "constant": np.full(n, -2.5),
        "zero": np.zeros(n),
        "signed zero": np.where(at % 2, -0.0, 0.0),
        "one-hot": np.eye(1, n, n * 2 // 3)[0],
        "ascending": at,
        "descending": at[::-1],
        "two values": np.where(at % 3, 1.0, -2.0),
        "few nonzero": np.where(at % (n // 4), 0.0, 1.0 + at),
        "half zero": np.maximum(rng.standard_normal(n), 0),
        "subnormal": rng.integers(0, 1 << 20, n) * 2.0**-149,
        "dynamic range": 2.0 ** rng.uniform(-126, 127, n),
        "heavy tail": values((n,)),
        "rounded": np.round(values((n,)), 1),
    }
    periods = {f"period {p}": np.resize(rng.standard_normal(p), n) for p in PERIODS}
    return {name: x.astype(np.float32) for name, x in (found | periods).items()}


@EVERY_CASE
@pytest.mark.parametrize("k", [1, 19, 100, 199, 200])
def test_adversarial_inputs(k):
    for name, x in hard(N).items():
        np.testing.assert_array_equal(positions(x, k), reference.top_k(x, k), err_msg=name)


@given(
    x=st.one_of(
        hnp.arrays(np.float32, N, elements=floats(127)),
        hnp.arrays(np.float32, N, elements=st.sampled_from([0.0, 1.0, -1.0, 2.0])),  # ties
    ),
    k=st.sampled_from([1, 19, 100, 199]),  # compiled above
)
def test_any_floats(x, k):
    payload = compiled(x, k)
    found = decode(payload.side, k, N)
    np.testing.assert_array_equal(found, reference.top_k(x, k))


@given(x=hnp.arrays(np.float32, (2, N), elements=floats(126)), k=st.sampled_from([1, 60]))
def test_complex_by_modulus(x, k):
    z = x[0] + 1j * x[1]
    found = np.asarray(decode(compiled(z.astype(np.complex64), k).side, k, N))
    assert np.all(np.diff(found) > 0)
    modulus = np.abs(z.astype(np.complex128))
    least_kept = modulus[found].min()
    most_dropped = np.delete(modulus, found).max()
    # Two roundings of the energy, and the floor below which moduli count as equal.
    assert least_kept >= most_dropped * (1 - 1e-6) - 1e-18 * modulus.max()


def test_k_is_the_ceiling_of_the_share():
    for n, fraction in itertools.product((10, 97, 1000), (0.01, 0.07, 0.1, 0.15, 0.5, 1.0)):
        like = jax.ShapeDtypeStruct((n,), jnp.float32)
        size = jax.eval_shape(
            lambda x, f=fraction: fg.compress(fg.TopK(fraction=f), x), like
        ).main.size
        assert size == reference.kept(fraction, n)
        assert size - 1 < fraction * n + 1e-6


LARGE = _selection.SAMPLE + 7_333
"""Long enough for a sampled bracket, and no multiple of anything."""

LOOKS = np.isin(np.arange(LARGE), np.asarray(_selection.sampled(LARGE, _selection.SAMPLE)))
UNLUCKY = np.random.default_rng(0).uniform(1, 2, LARGE).astype(np.float32)
UNLUCKY[~LOOKS] *= 9


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("k", [1, 400, LARGE // 2, LARGE - 1])
def test_hard_inputs_that_are_sampled(k):
    sampled = {"large where the sample looks": 10 / UNLUCKY, "small where it looks": UNLUCKY}
    for name, x in (hard(LARGE) | sampled).items():
        np.testing.assert_array_equal(positions(x, k), reference.top_k(x, k), err_msg=name)


@pytest.mark.parametrize("scale", [1.0, 1e-32, 1e35])
def test_a_long_complex_vector_by_modulus(scale):
    z = (scale * values((2, LARGE)) / 100).astype(np.float32)
    z = z[0] + 1j * z[1]
    found = positions(z.astype(np.complex64), 400)
    assert np.all(np.diff(found) > 0)
    modulus = np.abs(z.astype(np.complex128))
    assert modulus[found].min() >= np.delete(modulus, found).max() * (1 - 1e-6)


@pytest.mark.parametrize(("x", "lucky"), [(values((LARGE,)), True), (UNLUCKY, False)])
def test_the_bracket_is_proved_and_not_believed(x, lucky):
    @jax.jit
    def counts(x):
        source, key = _selection.keys(x)
        guess, capacity = _selection._guess(source, key, 400)
        return [jnp.sum(key(x) >= edge) for edge in (guess.low, guess.high)], capacity

    (from_low, from_high), capacity = jax.device_get(counts(x))
    holds = from_high < 400 <= from_low and from_low - from_high <= capacity
    assert holds == lucky
    assert capacity < LARGE // 2


@dataclasses.dataclass(frozen=True)
class Halved(fg.codecs.Selector):
    """The first four values, decoded to minus their half, with the defaults above it."""

    def compress(self, x, state, step):
        return fg.codecs.Compressed(fg.codecs.Payload(x[:4] + fg.codecs.poison(x)))

    def positions(self, side, n, step):
        return jnp.arange(4, dtype=jnp.int32)

    def decompress(self, payload, like, step):
        return super().decompress(fg.codecs.Payload(-payload.main / 2), like, step)


@pytest.mark.parametrize("transform", [fg.codecs.Identity(), fg.Dct(block=4)])
def test_a_selector_that_decodes_in_its_own_way_is_averaged_so(transform):
    codec, x = fg.chain(transform, Halved()), values((2, 512))
    mean = np.asarray(everywhere("vmap", lambda x: once(fg.AllGather(codec), x).mean, len(x))(x))
    np.testing.assert_allclose(mean[0, :4], -0.5 * x[:, :4].mean(0), rtol=1e-5)
    np.testing.assert_array_equal(mean[0, 4:], 0)


@pytest.mark.parametrize(("n", "chunk", "k"), [(5000, 64, 20), (40_000, 4096, 64), (9973, 101, 33)])
@pytest.mark.usefixtures("every_platform")
def test_many_of_a_row_are_the_same_by_digits_as_by_a_sort(n, chunk, k):
    """The program for a GPU has no sort, from few and from many values."""
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    x[::7], x[5:40], x[50], x[51] = 0, 1, np.nan, -np.inf
    codec, programs = fg.ChunkTopK(chunk, k), []
    for _ in range(2):
        program = jax.jit(lambda x: codec.compress(x, (), STEP).payload)
        with contextlib.ExitStack() as stack:
            if programs:
                stack.enter_context(_platform.one())
            sorts = any(word in program.lower(x).as_text() for word in ("chlo.top_k", "hlo.sort"))
            programs.append((sorts, program(x)))
    (with_sort, wanted), (without, found) = programs
    assert (with_sort, without) == (True, False)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
