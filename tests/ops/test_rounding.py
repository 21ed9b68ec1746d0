"""Rounding to a narrower dtype is a cast there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values

from fftgrad.ops import _rounding


@pytest.mark.parametrize("scale", [1.0, 1e-5, 3e-8, 1e-30, 1e4, 1e36])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_is_what_a_cast_keeps(dtype, scale):
    x = (values((5_000,), seed=3) * scale).astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = x.astype(jnp.dtype(dtype)).astype(np.float32)
    found = jax.jit(_rounding.rounded, static_argnums=1)(jnp.asarray(x), dtype)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_edges(dtype):
    info = jnp.finfo(dtype)
    half = float(info.eps) / 2
    x = np.float32(
        [0.0, 1 + half, 1 + 3 * half, -1 - half, info.max, -info.max, info.tiny, np.nan, np.inf]
    )
    found = np.asarray(_rounding.rounded(jnp.asarray(x), dtype))
    np.testing.assert_array_equal(found, x.astype(jnp.dtype(dtype)).astype(np.float32))
