"""Laws of codecs, over the whole table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CODECS,
    EVERY_CASE,
    HIDES_NONFINITE,
    LOSSLESS,
    OWN_SCALE,
    SHAPES,
    TILED,
    one_of_each,
    values,
)
from messages import LIKE, STEP, N, message

import fftgrad as fg
from fftgrad.codecs._chain import stages

LAWFUL = [name for name in CODECS if name not in HIDES_NONFINITE]


def round_trip(codec, x, step=STEP):
    return fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)


compiled_round_trip = jax.jit(round_trip, static_argnums=0)


@EVERY_CASE
@pytest.mark.parametrize("name", CODECS)
def test_a_message(name):
    """Its dtypes and bytes, and what comes of zeros, of any scale and of what is not finite."""
    codec, x = CODECS[name], values((N,))
    sent = message(codec, x)
    assert (sent.values.shape, sent.values.dtype) == ((N,), np.float32)
    assert sent.finite
    assert name not in LOSSLESS or np.array_equal(sent.values, x)
    assert sent.words.dtype == np.uint32
    own = sum(-(-leaf.nbytes // 4) * 4 for leaf in jax.tree.leaves(sent.payload))
    assert fg.wire_bytes(codec, LIKE) == sent.words.nbytes == 4 + own

    back = {scale: message(codec, x / 30 * np.float32(scale)).values for scale in SCALES}
    assert all(np.all(np.isfinite(y)) for y in (sent.values, *back.values()))
    zeros = message(codec, np.zeros(N)).values
    if name in OWN_SCALE:
        assert np.all(zeros != 0)
        assert all(len(np.unique(np.abs(y))) == 1 for y in back.values())
    else:
        assert np.all(zeros == 0)
        for scale, y in back.items():
            top = np.abs(x / 30 * np.float32(scale)).max()
            assert np.abs(y).max() <= 8 * max(top, np.finfo(np.float32).tiny), scale

    for largest in LARGEST:
        y = message(codec, largest).values
        assert np.any(y)
        assert may_overflow(codec) or np.isfinite(y).all()

    for bad in (np.nan, np.inf, -np.inf):
        hidden = np.all(np.isfinite(message(codec, np.where(np.arange(N) == 17, bad, x)).values))
        assert hidden == (name in HIDES_NONFINITE), bad


SCALES = (3e37, 1e-30, 1e-39, 1e-44)
MOST = np.finfo(np.float32).max
LARGEST = (
    np.full(N, MOST),
    np.where(np.arange(N) % 2, MOST, -MOST),
    np.where(np.arange(N) == 26, MOST, 0),
    MOST * np.random.default_rng(0).uniform(-1, 1, N),
)


def may_overflow(codec):
    """Whether it says that finite values at the end of float32 may become none."""
    overflowing = fg.Fft | fg.Dct | fg.Hadamard | fg.codecs.LloydMax
    return any(isinstance(stage, overflowing) for stage in stages(codec))


@pytest.mark.parametrize("name", one_of_each(LAWFUL))
def test_the_laws_of_codecs(name):
    """Those of values, receiver, positions, fidelity and claims, at a small size."""
    fg.testing.check_codec(CODECS[name], sizes=(90,), max_error=1.5, eager=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWFUL)
def test_the_laws_of_codecs_at_all_sizes_and_without_jit(name):
    fg.testing.check_codec(CODECS[name], max_error=1.5)


@pytest.mark.parametrize("name", one_of_each(CODECS))
@pytest.mark.usefixtures("every_platform")
def test_any_shape_is_lowered_for_accelerators_under_strict_promotion(name):
    """With the programs that only accelerators run. Each row has one of the shapes."""
    like = jax.ShapeDtypeStruct(SHAPES[list(CODECS).index(name) % len(SHAPES)], jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        trip = jax.jit(lambda x: round_trip(CODECS[name], x)).trace(like)
    assert (trip.out_info.shape, trip.out_info.dtype) == (like.shape, like.dtype)
    for platform in ("cuda", "tpu"):
        assert "func" in trip.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("name", ["top-k 6 bits", "blocked", "sign"])
def test_bfloat16_is_what_float32_is_but_for_the_last_rounding(name):
    x = values((N,)).astype(jnp.bfloat16)
    same = message(CODECS[name], x.astype(np.float32)).values.astype(jnp.bfloat16)
    np.testing.assert_array_equal(compiled_round_trip(CODECS[name], x), same)


@pytest.mark.parametrize("shape", TILED, ids=str)
def test_codecs_of_one_shape(shape):
    codec = TILED[shape]
    x = values(shape)
    np.testing.assert_allclose(compiled_round_trip(codec, x), x, rtol=1e-5, atol=1e-5)
    assert eval(repr(codec), vars(fg) | vars(fg.codecs)) == codec
    with pytest.raises(ValueError, match="by a rule"):
        fg.compress(codec, np.ones(31, np.float32))


@dataclasses.dataclass(frozen=True)
class Root(fg.codecs.Codec):
    """Exact, so it is right on average; but a square root is not linear."""

    unbiased = True

    def compress(self, x, state, step):
        return fg.codecs.Compressed(fg.codecs.Payload(jnp.sign(x) * jnp.sqrt(jnp.abs(x))))

    def decompress(self, payload, like, step):
        return payload.main * jnp.abs(payload.main)


def test_a_chain_claims_no_more_than_its_stages():
    fft, noise = fg.Fft(block=8), fg.UniformQuantizer()
    assert fg.chain(fft, noise).unbiased
    assert not fg.chain(fft, noise).summable
    assert not fg.chain(fft, fg.TopK(k=1), noise).unbiased
    assert not fg.chain(Root(), noise).unbiased
    assert fg.chain(fft, fg.codecs.Identity()).summable


def test_chains_nest_flat_and_have_a_unit():
    a, b, c = fg.Fft(block=8), fg.TopK(k=3), fg.RangeFloat(bits=8)
    assert fg.chain(a, fg.chain(b, c)) == fg.chain(fg.chain(a, b), c) == fg.chain(a, b, c)
    assert stages(fg.chain(a, b, c)) == (a, b, c)
    assert fg.chain() == fg.chain(fg.codecs.Identity()) == fg.codecs.Identity()
    assert fg.chain(a, fg.codecs.Identity(), b) == fg.chain(a, b)
    assert fg.chain(a) == a


def test_wire_bytes_needs_no_data_and_takes_trees():
    codec = fg.chain(fg.TopK(fraction=0.01), fg.RangeFloat(bits=6))
    tree = {
        "a": jax.ShapeDtypeStruct((1000, 900), "float32"),
        "b": jax.ShapeDtypeStruct((), "bfloat16"),
    }
    vector = jax.ShapeDtypeStruct((900_001,), "float32")
    assert fg.wire_bytes(codec, tree) == fg.wire_bytes(codec, vector)
    bits_a_parameter = 8 * fg.wire_bytes(codec, vector) / vector.size
    assert bits_a_parameter <= 0.147


NINE = np.ones(9, np.float32)
OF_THREE = fg.codecs.Payload(np.ones(3, np.float32))
MISTAKES = [
    (lambda: fg.compress(fg.Hadamard(), NINE), ValueError, "signs=False"),
    (lambda: fg.compress(fg.TopK(k=1), np.ones((0, 3), "f")), ValueError, "must not be empty"),
    (lambda: round_trip(fg.chain(fg.Fft(), fg.Fft()), NINE), ValueError, "first in the chain"),
    (lambda: round_trip(fg.chain(fg.Fft(), fg.Cast("bfloat16")), NINE), ValueError, "RangeFloat"),
    (lambda: fg.compress(fg.UniformQuantizer(), NINE), ValueError, "Step.of"),
    (lambda: fg.decompress(fg.codecs.Identity(), OF_THREE, NINE), ValueError, "shape"),
    (lambda: fg.decompress(fg.Sign, (), NINE), TypeError, r"decompress\(codec\)"),
]


@pytest.mark.parametrize(("make", "error", "remedy"), MISTAKES)
def test_bad_input_is_answered_with_the_remedy(make, error, remedy):
    with pytest.raises(error, match=remedy):
        make()


@pytest.mark.parametrize("name", one_of_each(CODECS))
def test_a_derivative_is_right_or_refused_with_the_remedy(name):
    """Codes have none: a gradient through a quantizer was zero, or that of its scale."""
    codec, step, x = CODECS[name], fg.Step.of(0), values((150,))

    def trip(x):
        return fg.decompress(codec, fg.compress(codec, x, step=step), like=x, step=step)

    derivative = jax.jit(lambda x: jax.jvp(trip, (x,), (x,)))
    last = stages(codec)[-1]
    if last.last and not isinstance(last, fg.Cast | fg.codecs.MeanMagnitude):
        with pytest.raises(NotImplementedError, match="stop_gradient"):
            derivative(x)
        return
    y, slope = derivative(x)  # along x itself, of which the values sent are multiples
    np.testing.assert_allclose(slope, y, atol=0.01 * np.linalg.norm(y))
    assert np.any(y)
