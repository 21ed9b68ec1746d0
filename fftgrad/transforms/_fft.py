"""The real Fourier transform, in blocks or whole."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._base import Like, Payload, Rng, constructor_call
from fftgrad.quantizers._cast import saturating_cast


@dataclasses.dataclass(frozen=True, repr=False)
class Fft:
    """Transform: the orthonormal real Fourier transform of each block of the vector.

    The vector is padded with zeros to blocks of b values. Of the b/2 + 1 coefficients c_j of a
    real block, c_0 and c_{b/2} are real, so b/2 complex slots hold them all:

        z_0 = c_0 + i c_{b/2},   z_j = √2 c_j   (0 < j < b/2).

    Nothing is stored twice, no slot is wasted, and x -> z is an isometry: Σ|z_j|² = Σ x_t². What
    a selector drops by modulus is thus the error, exactly.

    Args:
      block: the length b of a block, a power of two; a vector shorter than that is one block of
        the next power of two. None: the whole vector is one block, padded to the next even number
        whose prime factors are 2, 3, 5 and 7. Small blocks keep the energy's place.
      half: round the vector to float16 before the transform, saturating at ±65504 and
        counting what does.

    Shapes: x float32[n] -> main complex64[b/2 · ceil(n/b)], side ().

    Wire: 4b · ceil(n/b) bytes where nothing follows it in a chain.

    Claims: summable; unbiased and lossless to rounding, unless `half`. One non-finite value makes
      its whole block non-finite.

    Differs from the paper: the paper transforms the whole gradient (`block=None, half=True`), and
      says neither how it is padded or scaled nor how coefficients are stored.

    Raises:
      ValueError: if `block` is not a power of two of at least 2; while tracing, if the input is
        not a float32 vector.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> z = fg.compress(fg.Fft(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> z.shape, round(float(jnp.sum(jnp.abs(z) ** 2)), 4)
      ((4,), 13.0)

    References:
      Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural
      Networks", HPDC 2020, arXiv:1811.08596.
    """

    block: int | None = 256
    half: bool = False

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        if self.block is not None and (self.block < 2 or self.block & (self.block - 1)):
            raise ValueError(
                f"Fft(block): must be a power of two of at least 2, or None, got {self.block}; "
                f"use block=256, or block=None for one transform of the whole vector."
            )

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return not self.half

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        if x.dtype != jnp.float32 or x.ndim != 1:
            raise ValueError(
                f"Fft.compress(x): must be a float32 vector, got {x.dtype}{list(x.shape)}; put "
                "Fft first in the chain."
            )
        overflow: jax.Array | int = 0
        if self.half:
            narrow, overflow = saturating_cast(x, jnp.float16)
            x = narrow.astype(jnp.float32)
        block = self._block(x.size)
        rows = jnp.pad(x, (0, -x.size % block)).reshape(-1, block)
        c = jnp.fft.rfft(rows, norm="ortho")
        first = lax.complex(c[:, 0].real, c[:, -1].real)
        slots = jnp.concatenate([first[:, None], c[:, 1:-1] * math.sqrt(2.0)], axis=1)
        return Payload(slots.ravel(), (), overflow)

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        (n,) = like.shape
        block = self._block(n)
        slots = payload.main.reshape(-1, block // 2)
        zero = jnp.zeros((slots.shape[0], 1), jnp.float32)
        ends = lax.complex(slots[:, :1].real, zero), lax.complex(slots[:, :1].imag, zero)
        c = jnp.concatenate([ends[0], slots[:, 1:] * math.sqrt(0.5), ends[1]], axis=1)
        return jnp.fft.irfft(c, n=block, norm="ortho").ravel()[:n]

    def _block(self, n: int) -> int:
        if self.block is None:
            return _next_smooth(n)
        return min(self.block, 1 << max(1, (n - 1).bit_length()))


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
