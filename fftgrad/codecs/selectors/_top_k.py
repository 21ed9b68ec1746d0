"""The k coefficients of largest magnitude."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Selector, Sparse, Step
from fftgrad._values import check_count, check_within, value
from fftgrad.codecs.selectors import _largest
from fftgrad.ops.packing import _indices


def check_size(owner: str, fraction: float | None, k: int | None) -> None:
    """Refuses what does not say how many of n are kept."""
    if (fraction is None) == (k is None):
        raise ValueError(
            f"{owner}(fraction, k): exactly one must be given, got fraction={fraction}, k={k}; use "
            f"{owner}(fraction=0.01)."
        )
    check_static(f"{owner}(fraction)", fraction, float | int)
    check_static(f"{owner}(k)", k, int)
    if isinstance(fraction, int) and fraction == 1:
        raise TypeError(
            f"{owner}(fraction): must be a float, because 1 may be meant as one value, got 1; use "
            f"{owner}(k=1), or fraction=1.0 for all."
        )
    if fraction is not None:
        remedy = f"it is what is kept: to drop a share theta use {owner}(fraction=1 - theta)."
        check_within(f"{owner}(fraction)", fraction, "(0, 1]", remedy)
    if k is not None:
        check_count(f"{owner}(k)", k, f"use {owner}(k=1).")


def check_static(name: str, value: Any, kind: Any) -> None:
    """Refuses what is not a Python number of this kind."""
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return
    wanted = "int" if kind is int else "int or float"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{name}: must be a Python {wanted}, because the size of the payload is static, got "
            f"{value!r}; to change it while training use Scheduled, and under "
            "optax.inject_hyperparams name it in static_args."
        )
    raise TypeError(
        f"{name}: must be a Python {wanted}, got {value!r}; pass "
        f"{'100, or the like' if kind is int else '0.01, or the like'}."
    )


def kept(fraction: float | None, k: int | None, n: int) -> int:
    """How many of n are kept."""
    if k is not None:
        return min(k, n)
    # Rounded first: 0.07 * 100 is a little above 7 in binary.
    return max(1, math.ceil(round((fraction or 0.0) * n, 6)))


def shard_k(k: int | None, parts: int) -> int | None:
    """How many are kept of each of several equal parts of a vector of which k are kept."""
    return None if k is None else -(-k // parts)


@value
class TopK(Selector):
    """Selector: keep the k coefficients of largest magnitude.

    For x in R^n or C^n let S be the positions of the k largest |x_i|, the lowest position first
    among equals. The payload is (x_i), i in S, in order of position, and S. Exactly k are kept,
    whatever the data, and found without a sort. A complex coefficient counts by its modulus, as
    zero if both parts are subnormal. NaN counts as larger than everything, so it is seen.

    Args:
      fraction: share of the n coefficients kept, 0 < fraction <= 1; k = ceil(fraction · n).
      k: how many are kept, instead; all n where n < k.

    Wire: x float32[n] | complex64[n] -> main of that dtype [k]; side the smaller of
      k(2 + floor(log2(n/k)))/8 (Elias-Fano) and n/8 (bitmap) bytes; nothing where k = n.

    Claims: biased; not summable; ||x - C(x)||² <= (1 - k/n) ||x||².

    Differs from the paper: the paper sends a bitmap always, and selects exactly by a sort or
      approximately by buckets.

    Raises:
      TypeError: if an argument is traced: the size of the payload has to be static.

    Example:
      >>> fg.compress(fg.TopK(fraction=0.5), jnp.array([1.0, -4.0, 2.0, 0.5])).main
      Array([-4.,  2.], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596. Elias, J. ACM 21(2), 1974, for the code. Aji and
      Heafield, EMNLP 2017, arXiv:1704.05021.
    """

    fraction: float | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        check_size("TopK", self.fraction, self.k)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"TopK.compress(x): must be a float or complex vector, got {x.dtype}"
                f"{list(x.shape)}; put TopK before quantizers in the chain."
            )
        k = self._k(x.size)
        if k == x.size:
            return Compressed(Payload(x))
        # Kept: it is read many times, each of which would look for it in all of the leaves.
        x = lax.optimization_barrier(x)
        positions, code = _indices.encode(_largest.largest(*keys(x), k), k, x.size)
        return Compressed(Payload(x[positions], code))

    def shard(self, parts: int) -> "TopK":
        return dataclasses.replace(self, k=shard_k(self.k, parts))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        return payload.main if self._k(n) == n else super().decompress(payload, like, step)

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse | None:
        (n,) = like.shape
        if self._k(n) == n:
            return None
        return Sparse(self.positions(payload.side, n, step), payload.main)

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        if self._k(n) == n:
            return jnp.arange(n, dtype=jnp.int32)
        return _indices.decode(side, self._k(n), n)

    def _k(self, n: int) -> int:
        return kept(self.fraction, self.k, n)


def keys(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """What to read, and a cheap map of it to integers below 2**31 that grow with |x_i|.

    The bits of a float that is not negative order as it does.
    """
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x, lambda x: lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)
    # Half as many bits as x, so cheaper to keep than to find again in each pass.
    return _energy_bits(x), lambda energy: energy


def _energy_bits(z: jax.Array) -> jax.Array:
    """|z_i|² as 9 bits of exponent and 22 of mantissa; not finite is most, subnormal is zero.

    Each value is scaled by its own power of two, so that no square overflows or vanishes.
    """
    re, im = jnp.abs(z.real), jnp.abs(z.imag)
    exponent = (
        jnp.maximum(
            lax.bitcast_convert_type(re, jnp.uint32), lax.bitcast_convert_type(im, jnp.uint32)
        )
        >> 23
    )
    scale = lax.bitcast_convert_type((255 - exponent) << 23, jnp.float32)
    square = jnp.square(re * scale) + jnp.square(im * scale)  # in [4, 32)
    bits = (lax.bitcast_convert_type(square, jnp.uint32) >> 1) + ((2 * exponent - 130) << 22)
    bits = jnp.where(exponent == 0, 0, jnp.where(exponent == 255, jnp.uint32(0x7FFFFFFF), bits))
    return lax.optimization_barrier(bits)  # or each of its readers would find it again
