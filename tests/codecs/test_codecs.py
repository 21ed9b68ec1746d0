"""Laws of codecs, over the whole table and all shapes."""

import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CODECS,
    HIDES_NONFINITE,
    LOSSLESS,
    OWN_SCALE,
    SHAPES,
    TILED,
    by_kind,
    floats,
    values,
)
from hypothesis import given
from hypothesis.extra import numpy as hnp

import fftgrad as fg
from fftgrad.codecs._chain import stages
from fftgrad.codecs._spec import payload_spec
from fftgrad.exchanges import _wire

EVERY_PLATFORM = True
ALL = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
STEP = fg.Step.of(3)


def round_trip(codec, x, step=STEP):
    return fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)


compiled_round_trip = jax.jit(round_trip, static_argnums=0)


@ALL
def test_repr_is_the_constructor_call(codec):
    same = eval(repr(codec), dict(vars(fg)))
    assert same == codec
    assert hash(same) == hash(codec)
    assert pickle.loads(pickle.dumps(codec)) == codec


@ALL
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(codec, shape):
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    y = jax.eval_shape(lambda x: round_trip(codec, x), like)
    assert (y.shape, y.dtype) == (like.shape, like.dtype)


@ALL
@pytest.mark.parametrize("shape", [(), (7,), (1009,)], ids=str)
def test_shape_dtype_and_bytes(codec, shape):
    x = jnp.asarray(values(shape))

    @jax.jit
    def all_of_it(x):
        payload = fg.compress(codec, x, step=STEP)
        buffer = _wire.pack(_wire.NOTHING, payload, jnp.uint32(0))
        return buffer, payload, fg.decompress(codec, payload, x, step=STEP)

    buffer, payload, y = all_of_it(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert bool(jnp.all(jnp.isfinite(y)))
    assert buffer.dtype == jnp.uint32
    assert fg.wire_bytes(codec, x) == buffer.nbytes
    own = sum(-(-leaf.nbytes // 4) * 4 for leaf in jax.tree.leaves(payload))
    assert fg.wire_bytes(codec, x) == 8 + own


# One codec for each kind of stage: run one operation at a time, a chain is its stages.
FIRST_OF_A_KIND = {
    tuple(type(stage) for stage in stages(codec)): name for name, codec in reversed(CODECS.items())
}
KINDS = [name for kinds, name in FIRST_OF_A_KIND.items() if len(kinds) == 1]


@pytest.mark.parametrize("name", [*KINDS, "blocked"])
def test_jit_changes_nothing_and_compiles_once(name):
    codec = CODECS[name]
    f = jax.jit(lambda x: round_trip(codec, x))
    f(jnp.asarray(values((90,), seed=1)))
    x = jnp.asarray(values((90,)))
    np.testing.assert_allclose(f(x), round_trip(codec, x), rtol=1e-5, atol=1e-6)
    assert f._cache_size() == 1


@pytest.mark.parametrize("name", by_kind())
def test_vmap_is_a_loop(name):
    codec = CODECS[name]
    x = jnp.asarray(values((3, 90)))
    batched = jax.jit(jax.vmap(lambda row: round_trip(codec, row)))(x)
    each = jnp.stack([compiled_round_trip(codec, row) for row in x])
    np.testing.assert_allclose(batched, each, rtol=1e-5, atol=1e-6)


@ALL
def test_bfloat16_in_bfloat16_out(codec):
    x = jnp.asarray(values((90,))).astype(jnp.bfloat16)
    y = compiled_round_trip(codec, x)
    assert y.dtype == jnp.bfloat16
    same = compiled_round_trip(codec, x.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, same)


def has_own_scale(codec):
    return any(codec == CODECS[name] for name in OWN_SCALE)


@ALL
def test_zero_comes_back_as_zero(codec):
    y = compiled_round_trip(codec, jnp.zeros(90))
    assert bool(jnp.any(y != 0)) == has_own_scale(codec)


@ALL
@pytest.mark.parametrize("scale", [3e37, 1e-30, 1e-39, 1e-44])
def test_huge_tiny_and_subnormal_stay_finite(codec, scale):
    x = jnp.asarray((values((90,)) / 30 * scale).astype(np.float32))
    y = compiled_round_trip(codec, x)
    assert bool(jnp.all(jnp.isfinite(y)))
    top = float(jnp.max(jnp.abs(x)))
    if has_own_scale(codec):
        assert len(np.unique(np.abs(y))) == 1
        return
    assert float(jnp.max(jnp.abs(y))) <= 8 * max(top, float(jnp.finfo(jnp.float32).tiny))


MOST = np.finfo(np.float32).max
AT_THE_END = {
    "all": np.full(90, MOST),
    "by turns": np.where(np.arange(90) % 2, MOST, -MOST),
    "one": np.where(np.arange(90) == 17, MOST, 0),
    "any": MOST * np.random.default_rng(0).uniform(-1, 1, 90),
}


def may_overflow(codec):
    """Whether it says that finite values at the end of float32 may become none."""
    return any(
        isinstance(stage, fg.Fft | fg.Dct | fg.Hadamard | fg.codecs.LloydMax)
        or getattr(stage, "rescale", False)
        for stage in stages(codec)
    )


@ALL
def test_the_largest_values_stay_finite_or_are_seen(codec):
    for name, x in AT_THE_END.items():
        x = x.astype(np.float32)
        y = np.asarray(compiled_round_trip(codec, x))
        assert np.any(y), name
        assert may_overflow(codec) or np.isfinite(y).all(), name


@ALL
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_value_is_not_hidden(codec, bad):
    x = jnp.asarray(values((90,))).at[17].set(bad)
    hidden = bool(jnp.all(jnp.isfinite(compiled_round_trip(codec, x))))
    keeps_it = any(repr(codec) == repr(CODECS[name]) for name in HIDES_NONFINITE)
    assert hidden == keeps_it


@pytest.mark.parametrize("shape", TILED, ids=str)
def test_codecs_of_one_shape(shape):
    codec = TILED[shape]
    x = jnp.asarray(values(shape))
    np.testing.assert_allclose(compiled_round_trip(codec, x), x, rtol=1e-5, atol=1e-5)
    assert eval(repr(codec), dict(vars(fg))) == codec
    with pytest.raises(ValueError, match="by a rule"):
        fg.compress(codec, jnp.ones(31))


@pytest.mark.parametrize("name", sorted(LOSSLESS))
@given(x=hnp.arrays(np.float32, 33, elements=floats(100)))
def test_lossless_bit_for_bit(name, x):
    np.testing.assert_array_equal(compiled_round_trip(CODECS[name], x), x)


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.summable], ids=repr)
def test_summable_codecs_commute_with_the_sum(codec):
    x = jnp.asarray(values((4, 75)))
    payloads = jax.vmap(lambda row: fg.compress(codec, row, step=STEP))(x)
    each = jax.vmap(lambda payload: fg.decompress(codec, payload, x[0], step=STEP))(payloads)
    total = jax.tree.map(lambda a: a.sum(0), payloads)
    whole = fg.decompress(codec, total, x[0], step=STEP)
    np.testing.assert_allclose(whole, each.sum(0), rtol=1e-5, atol=1e-5)
    if not any(isinstance(stage, fg.RandomK) for stage in stages(codec)):
        np.testing.assert_allclose(whole, x.sum(0), rtol=1e-2, atol=1e-2)


def right_on_average(codec):
    """Of which values the mean over many draws is the value, but for what chance explains."""
    draws = 4000
    x = jnp.asarray(values((24,)))
    keys = jax.random.split(jax.random.key(11), draws)
    y = jax.jit(jax.vmap(lambda key: round_trip(codec, x, fg.Step.of(key))))(keys)
    sigma = np.std(np.asarray(y, np.float64), axis=0) / math.sqrt(draws)
    error = np.abs(np.mean(np.asarray(y, np.float64), axis=0) - np.asarray(x, np.float64))
    return error <= 5 * sigma + 1e-5 * np.abs(x).max()


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.unbiased], ids=repr)
def test_unbiased_codecs_are_right_on_average(codec):
    assert np.all(right_on_average(codec))


@dataclasses.dataclass(frozen=True)
class Root(fg.Codec):
    """Exact, so it is right on average; but a square root is not linear."""

    unbiased = True

    def compress(self, x, state, step):
        return fg.Compressed(fg.Payload(jnp.sign(x) * jnp.sqrt(jnp.abs(x))))

    def decompress(self, payload, like, step):
        return payload.main * jnp.abs(payload.main)


def test_noise_behind_what_is_not_linear_is_not_right_on_average():
    noise = fg.RangeFloat(bits=4, rounding="stochastic")
    for codec in (Root(), noise):
        assert codec.unbiased
        assert np.all(right_on_average(codec))
    assert not np.all(right_on_average(fg.chain(Root(), noise)))
    assert not fg.chain(Root(), noise).unbiased


def test_some_codec_claims_each_claim():
    assert {c.summable for c in CODECS.values()} == {True, False}
    assert {c.unbiased for c in CODECS.values()} == {True, False}


def test_a_chain_claims_no_more_than_its_stages():
    fft, noise = fg.Fft(block=8), fg.RangeFloat(bits=4, rounding="stochastic")
    assert fg.chain(fft, noise).unbiased
    assert not fg.chain(fft, noise).summable
    assert not fg.chain(fft, fg.TopK(k=1), noise).unbiased
    assert fg.chain(fft, fg.Identity()).summable


def test_chains_nest_flat_and_have_a_unit():
    a, b, c = fg.Fft(block=8), fg.TopK(k=3), fg.RangeFloat(bits=8)
    assert fg.chain(a, fg.chain(b, c)) == fg.chain(fg.chain(a, b), c) == fg.chain(a, b, c)
    assert stages(fg.chain(a, b, c)) == (a, b, c)
    assert fg.chain() == fg.chain(fg.Identity()) == fg.Identity()
    assert fg.chain(a, fg.Identity(), b) == fg.chain(a, b)
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


def test_payload_spec_is_the_payload():
    codec = CODECS["blocked"]
    x = jnp.asarray(values((50,)))
    spec, payload = payload_spec(codec, x), fg.compress(codec, x)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), spec) == jax.tree.map(
        lambda a: (a.shape, a.dtype), payload
    )


@pytest.mark.parametrize(
    ("make", "error", "remedy"),
    [
        (lambda: fg.chain(fg.TopK), TypeError, "pass a value"),
        (lambda: fg.chain("topk"), TypeError, "pass a value"),
        (lambda: fg.Fft(block=48), ValueError, "use block=64"),
        (lambda: fg.Dct(block=2048), ValueError, "use block=64"),
        (lambda: fg.Hadamard(block=3), ValueError, "use block=64"),
        (lambda: fg.compress(fg.Hadamard(), jnp.ones(3)), ValueError, "signs=False"),
        (lambda: fg.TopK(), ValueError, "fraction=0.01"),
        (lambda: fg.TopK(fraction=0.1, k=2), ValueError, "exactly one"),
        (lambda: fg.TopK(fraction=85), ValueError, "1 - theta"),
        (lambda: fg.TopK(k=0), ValueError, "k=1"),
        (lambda: fg.TopK(k=True), TypeError, "pass a number without quotes"),
        (lambda: fg.Cast("float32"), TypeError, "bfloat16"),
        (lambda: fg.Cast("int8"), TypeError, "bfloat16"),
        (lambda: fg.RangeFloat(bits=1), ValueError, "signs"),
        (lambda: fg.RangeFloat(bits=17), ValueError, "no quantizer"),
        (lambda: fg.RangeFloat(bits=8, mantissa=9), ValueError, "mantissa=4"),
        (lambda: fg.RangeFloat(bits=8, rounding="up"), ValueError, "nearest"),
        (lambda: fg.RangeFloat(8, rounding="stochastic", zero=False), ValueError, "zero=True"),
        (lambda: fg.codecs.FixedRangeFloat(8, maximum=-1.0), ValueError, "minimum < 0 < maximum"),
        (
            lambda: fg.codecs.FixedRangeFloat(8, maximum=1.0, eps=2.0),
            ValueError,
            "inside the range",
        ),
        (
            lambda: fg.codecs.FixedRangeFloat(4, mantissa=3, maximum=1.0, eps=1e-3),
            ValueError,
            "raise eps",
        ),
        (
            lambda: fg.codecs.FixedRangeFloat(4, maximum=1.0, minimum=-1e-9),
            ValueError,
            "more even range",
        ),
        (lambda: fg.compress(fg.Identity(), jnp.arange(3)), TypeError, "optax.partition"),
        (lambda: fg.compress(fg.Identity(), jnp.ones(3, complex)), TypeError, "cast it"),
        (lambda: fg.compress(fg.TopK(k=1), jnp.ones((0, 3))), ValueError, "leave empty arrays out"),
        (
            lambda: fg.chain(fg.RangeFloat(8), fg.TopK(k=1)),
            ValueError,
            "one quantizer at the end",
        ),
        (
            lambda: round_trip(fg.chain(fg.Fft(), fg.Fft()), jnp.ones(3)),
            ValueError,
            "first in the chain",
        ),
        (
            lambda: fg.chain(fg.RangeFloat(8), fg.RangeFloat(8)),
            ValueError,
            "one quantizer at the end",
        ),
        (
            lambda: round_trip(fg.chain(fg.Fft(), fg.Cast("bfloat16")), jnp.ones(3)),
            TypeError,
            "RangeFloat",
        ),
        (lambda: fg.compress(CODECS["range float stochastic"], jnp.ones(3)), ValueError, "Step.of"),
        (
            lambda: fg.decompress(
                CODECS["blocked"], fg.compress(CODECS["blocked"], jnp.ones(90)), jnp.ones(40)
            ),
            ValueError,
            "shape it came from",
        ),
        (
            lambda: fg.tools.decompress_mean(
                fg.Sign(), fg.compress(fg.Sign(), jnp.ones(90)), jnp.ones(90)
            ),
            ValueError,
            "of each of 3 workers",
        ),
        (
            lambda: fg.tools.decompress_mean(fg.Sign(), (), jnp.ones(9)),
            ValueError,
            "shape it came from",
        ),
        (
            lambda: fg.tools.decompress_mean(fg.Sign, (), jnp.ones(9)),
            TypeError,
            r"decompress_mean\(codec",
        ),
        (lambda: fg.decompress(fg.Sign, (), jnp.ones(9)), TypeError, r"decompress\(codec\)"),
        (
            lambda: fg.decompress(fg.Cast("bfloat16"), fg.Payload(jnp.ones(9)), jnp.ones(9)),
            ValueError,
            "shape it came from",
        ),
        (
            lambda: fg.decompress(fg.Cast("bfloat16"), fg.Payload(1.0), jnp.ones(9)),
            ValueError,
            "shape it came from",
        ),
        (
            lambda: fg.tools.decompress_mean(
                fg.Sign(), [fg.compress(fg.Sign(), jnp.ones(9))] * 2, jnp.ones(9)
            ),
            TypeError,
            r"got 2 payloads; stack them by jax\.tree\.map",
        ),
    ],
)
def test_bad_input_is_answered_with_the_remedy(make, error, remedy):
    with pytest.raises(error, match=remedy):
        make()


def test_a_traced_fraction_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="static_args"):
        jax.jit(lambda f: fg.compress(fg.TopK(fraction=f), jnp.ones(9)).main)(0.5)
