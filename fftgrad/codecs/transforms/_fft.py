"""The real Fourier transform, in blocks or whole."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Sparse, Step, Transform
from fftgrad._values import value
from fftgrad.codecs.transforms import _blocks
from fftgrad.ops import _rows
from fftgrad.ops._rounding import saturating_cast

PRODUCT = 64
"""The longest block for which a product with a matrix beats a fast algorithm."""


@value
class Fft(Transform):
    """Transform: the orthonormal real Fourier transform of each block of the vector.

    The vector is padded with zeros to blocks of b values. Of the b/2 + 1 coefficients c_j of a
    real block, c_0 and c_{b/2} are real, so b/2 complex slots hold them all:

        z_0 = c_0 + i c_{b/2},   z_j = √2 c_j   (0 < j < b/2).

    x -> z is an isometry: Σ|z_j|² = Σ x_t². What a selector drops by modulus is the error, exactly.

    Args:
      block: the length b of a block, a power of two up to 2^28; a vector shorter than that is one
        block of the next power of two. None: the whole vector is one block, padded to the next even
        number whose prime factors are 2, 3, 5 and 7; beyond 2^28 values, as few equal blocks as
        possible.
      half: round the vector to float16 before the transform, saturating at ±65504 and
        counting what does.

    Wire: x float32[n] -> main complex64[b/2 · ceil(n/b)].

    Claims: summable; unbiased and lossless to rounding, unless `half`. One non-finite value makes
      its whole block non-finite, and so may finite ones beyond 2^128 / √b: the step is a bad one.

    Differs from the paper: the paper transforms the whole gradient (`block=None, half=True`), and
      says neither how it is padded or scaled nor how coefficients are stored.

    Example:
      >>> z = fg.compress(fg.Fft(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> z.shape, round(float(jnp.sum(jnp.abs(z) ** 2)), 4)
      ((4,), 13.0)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596.
    """

    block: int | None = 256
    half: bool = False

    def __post_init__(self) -> None:
        if self.block is not None:
            _blocks.check_block("Fft", self.block, _blocks.CHUNK)

    @property
    def unbiased(self) -> bool:
        return not self.half

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _blocks.check_vector("Fft", x)
        overflow: jax.Array | int = 0
        if self.half:
            narrow, overflow = saturating_cast(x, jnp.float16)
            x = narrow.astype(jnp.float32)
        block = self._block(x.size)
        rows = _rows.rows(x, block)
        return Compressed(Payload(_slots(rows).ravel()), overflow)

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        block = self._block(n)

        return _inverse(payload.main.reshape(-1, block // 2)).ravel()[:n]

    def reach(self, n: int) -> int:
        return self._block(n)

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        b = self._block(n)
        return _blocks.at_blocks(coefficients, n, _inverse, b, b // 2)

    def _block(self, n: int) -> int:
        if self.block is None:
            return _next_smooth(-(-n // -(-n // _blocks.CHUNK)))
        return _blocks.fit(self.block, n)


def _slots(rows: jax.Array) -> jax.Array:
    b = rows.shape[1]
    if b <= PRODUCT:
        parts = _blocks.by_chunks(lambda r: _blocks.times(r, basis(b)), rows)
        return lax.complex(parts[:, : b // 2], parts[:, b // 2 :])
    c = _blocks.by_chunks(lambda r: jnp.fft.rfft(r, norm="ortho"), rows)
    first = lax.complex(c[:, :1].real, c[:, -1:].real)
    # Selected, not concatenated: that fuses into what reads it, so it need not be stored.
    is_first = jnp.arange(b // 2)[None] == 0
    return jnp.where(is_first, first, c[:, :-1] * math.sqrt(2.0))


def _inverse(slots: jax.Array) -> jax.Array:
    b = 2 * slots.shape[1]
    if b <= PRODUCT:
        # Kept, or XLA multiplies the halves on their own, and adds two results.
        parts = lax.optimization_barrier(jnp.concatenate([slots.real, slots.imag], axis=1))
        return _blocks.by_chunks(lambda r: _blocks.times(r, basis(b).T), parts)

    def inverse(z: jax.Array) -> jax.Array:
        first = z[:, :1]
        c = jnp.pad(z * math.sqrt(0.5), ((0, 0), (0, 1)))
        zero = jnp.zeros_like(first.real)
        c = c.at[:, :1].set(lax.complex(first.real, zero))
        c = c.at[:, -1:].set(lax.complex(first.imag, zero))
        return jnp.fft.irfft(c, n=b, norm="ortho")

    return _blocks.by_chunks(inverse, slots)


def basis(b: int) -> np.ndarray:
    """Column j < b/2 is the real part of slot j, column b/2 + j its imaginary part; orthogonal."""
    t, j = np.ogrid[:b, : b // 2]
    angle = 2 * np.pi * (t * j % b) / b
    real, imaginary = np.sqrt(2 / b) * np.cos(angle), -np.sqrt(2 / b) * np.sin(angle)
    real[:, 0], imaginary[:, 0] = np.sqrt(1 / b), np.sqrt(1 / b) * (-1.0) ** t[:, 0]
    return np.concatenate([real, imaginary], axis=1).astype(np.float32)


def _next_smooth(n: int) -> int:
    """The least even number from n on with no prime factor above 7."""
    candidate = n + n % 2
    while candidate < 2 or not _is_smooth(candidate):
        candidate += 2
    return candidate


def _is_smooth(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1
