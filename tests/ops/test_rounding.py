"""Rounding to a narrower dtype is a cast there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

from fftgrad.ops import _rounding

BITS = 1 << 16
rounded = jax.jit(_rounding.rounded, static_argnums=1)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 3e-8, 1e-30, 1e4, 1e36])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_is_what_a_cast_keeps(dtype, scale):
    info = jnp.finfo(dtype)
    half, most = float(info.eps) / 2, float(info.max)
    edges = [0.0, 1 + half, 1 + 3 * half, -1 - half, most, -most, info.tiny, np.nan, np.inf]
    x = np.concatenate([values((5_000,), seed=3) * scale, edges]).astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = x.astype(jnp.dtype(dtype)).astype(np.float32)
    found = rounded(x, dtype)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-39, 1e37])
def test_by_chance_it_is_right_on_average(scale):
    """Of all 2**16 draws exactly as many go up as the value is above the lower neighbour."""
    x = (values((200,), seed=3) * scale).astype(np.float32)
    draws = np.arange(BITS, dtype=np.uint32) << 16
    round_all = jax.jit(jax.vmap(lambda d: _rounding.to_bfloat16(x, jnp.full(x.shape, d))))
    found = np.asarray(round_all(draws), np.float64)
    np.testing.assert_allclose(found.mean(0), x.astype(np.float64), rtol=1e-12)
    assert max(len(np.unique(column)) for column in found.T) == 2


@pytest.mark.parametrize("draw", [0, 2**32 - 1])
def test_by_chance_at_the_edges(draw):
    """What is a bfloat16 stays, what is beyond the largest is cut, what is not finite shows."""
    top = float(jnp.finfo(jnp.bfloat16).max)
    x = np.float32([0.0, -0.0, 1.0, -3.5, top, -top, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan])
    hidden = np.uint32([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32)
    draws = np.full(x.size + 3, draw, np.uint32)
    found = jax.jit(_rounding.to_bfloat16)(np.concatenate([x, hidden]), draws)
    wanted = np.concatenate([np.clip(x[:8], -top, top), x[8:], [np.nan] * 3])
    np.testing.assert_array_equal(np.asarray(found, np.float64), wanted)
    assert np.signbit(np.asarray(found, np.float32)[1])
