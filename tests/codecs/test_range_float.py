"""Range-based floats: the paper's facts, the proven bounds, and the choice of the mantissa."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import floats, values
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from messages import compress

import fftgrad as fg
from fftgrad.codecs._range_float import Window
from fftgrad.ops import _codes

unpack = jax.jit(_codes.unpack, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=0)
def both_ways(codec, x):
    """What comes back, and how many values overflow."""
    out = codec.compress(x, (), fg.Step.of(0))
    return codec.decompress(out.payload, x, fg.Step.of(0)), out.overflow


def round_trip(codec, x):
    return both_ways(codec, x)[0]


def codes_of(codec, x):
    return unpack(compress(codec, np.asarray(x, np.float32)).main, codec.bits, len(x)).tolist()


PAPER = Window(reference.count_of(0.125, 3), 33, 33, 3)
"""The paper's example: 8 bits, m = 3, eps = 0.125, max = 2."""


@functools.partial(jax.jit, static_argnums=1)
def by_paper(x, half=0):
    """Codes and values of its example."""
    codes = PAPER.encode(x, half)
    return codes, PAPER.decode(codes)


def test_worked_example_of_the_paper():
    codes, values = by_paper(np.float32([0.256, 0.125, 2.0, 0.0, -0.256]))
    assert codes.tolist() == [9, 1, 33, 0, 33 + 9]
    assert values.tolist() == [0.25, 0.125, 2.0, 0.0, -0.25]


@given(x=st.floats(0.125, 4.0, width=32))
def test_algorithm_1_of_the_paper(x):
    code = reference.paper_encode(x, 3, 0.125, 2.0)
    codes, values = by_paper(np.float32([x]))
    assert (codes.tolist(), values.tolist()) == ([code], [reference.paper_decode(code, 3, 0.125)])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.5, 0.5), (-0.25, 1.0)])
@pytest.mark.parametrize("bits", [8, 10])
def test_eps_is_where_the_papers_loop_ends(low, high, bits):
    codec = fg.RangeFloat(bits, rounding="truncate", limits=(low, high))
    eps, positive = reference.paper_tuning(low, high, bits, codec.m)
    window = codec._window(None)
    assert abs(window.base - reference.count_of(eps, codec.m)) <= 1
    assert abs(window.positive - positive) <= 1
    assert window.positive + window.negative <= 2**bits - 1


@pytest.mark.parametrize("bits", range(2, 17))
def test_every_width_round_trips_what_it_can_represent(bits):
    codec = fg.RangeFloat(bits, limits=(-1.0, 1.0))
    window = codec._window(None)
    grid = reference.representable(window.base, window.positive, codec.m).astype(np.float32)
    x = np.concatenate([grid, -grid, [0.0]]).astype(np.float32)
    np.testing.assert_array_equal(round_trip(codec, x), x)
    assert len(set(codes_of(codec, x))) == x.size <= 2**bits


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_nearest_is_nearest_among_all(bits):
    codec = fg.RangeFloat(bits, limits=(-1.0, 1.0))
    window = codec._window(None)
    x = np.clip(values((400,)) / 4, -1, 1)
    expected = reference.range_float(x, codec.m, window.base, window.positive)
    got = np.asarray(round_trip(codec, x), np.float64)
    # Halfway between two values both are nearest: compare the distance, not the choice.
    np.testing.assert_allclose(np.abs(got - x), np.abs(expected - x), rtol=1e-6, atol=1e-9)


@functools.partial(jax.jit, static_argnums=0)
def least(codec, x):
    """The smallest value in the range that is fitted to an array."""
    return codec._window(jnp.max(jnp.abs(x))).eps


@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
@pytest.mark.parametrize(("bits", "m"), [(4, 1), (8, 4), (10, 6), (16, 11)])
@given(x=hnp.arrays(np.float32, 64, elements=floats(100)))
def test_proven_relative_error(rounding, bits, m, x):
    codec = fg.RangeFloat(bits=bits, mantissa=m, rounding=rounding)
    y, overflow = both_ways(codec, x)
    assert overflow == 0
    y = np.asarray(y, np.float64)
    inside = np.abs(x) >= float(least(codec, x))
    bound = 2.0 ** -(m + 1) if rounding == "nearest" else 2.0**-m
    assert np.all(np.abs(y - x)[inside] <= bound * np.abs(x)[inside] * (1 + 1e-9))


def test_below_eps_goes_to_the_nearer_of_zero_and_eps():
    x = np.float32([0.06, 0.0626, 0.12, -0.06, -0.0626])
    assert by_paper(x, 1 << 19)[1].tolist() == [0.0, 0.125, 0.125, 0.0, -0.125]


def test_beyond_the_range_saturates_and_is_counted():
    codec = fg.RangeFloat(bits=8, mantissa=3, limits=(-1.0, 2.0))
    x = np.float32([3.0, np.inf, 1.9, -1.5, -np.inf, np.nan, -1.0, 2.0])
    y, overflow = both_ways(codec, x)
    assert overflow == 5
    assert y.tolist() == [2.0, 2.0, 1.875, -1.0, -1.0, 2.0, -1.0, 2.0]


def test_limits_are_rounded_as_values_and_the_least_value_is_normal():
    assert round_trip(fg.RangeFloat(8, 3, limits=(-1.99, 1.99)), np.float32([1.99])) == 2.0
    eps = fg.RangeFloat(16, 2, limits=(-1.0, 1.0))._window(None).eps
    assert float(eps) == np.finfo(np.float32).tiny


@pytest.mark.parametrize("limits", [1.0, (-1.0,), [-1.0, 1.0], (-1.0, True), "ab"])
def test_limits_are_two_numbers(limits):
    with pytest.raises(TypeError, match=r"RangeFloat\(limits\): must be a tuple of two numbers"):
        fg.RangeFloat(8, limits=limits)


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 10, 12])
def test_the_chosen_mantissa_is_the_best_on_normal_data(bits):
    """By the oracle: the codec rounds to the nearest, as other tests show."""
    x = np.clip(np.random.default_rng(0).standard_normal(4_000), -5, 5)
    x[0] = 5.0

    def error(m):
        top = reference.count_of(5.0, m)
        base = max(1, top - 2 ** (bits - 1) + 2)
        return np.linalg.norm(reference.range_float(x, m, base, top - base + 1) - x)

    errors = {m: error(m) for m in range(1, bits + 1)}
    assert errors[fg.RangeFloat(bits).m] <= 1.05 * min(errors.values())
