"""The discrete cosine transform of blocks, by a product of matrices."""

import dataclasses

import jax
import numpy as np

from fftgrad._base import Like, Payload, Rng, constructor_call
from fftgrad.packing import _whole
from fftgrad.transforms import _blocks

MAX_BLOCK = 1024


@dataclasses.dataclass(frozen=True, repr=False)
class Dct:
    """Transform: the orthonormal cosine transform (DCT-II) of each block of the vector.

    The vector is padded with zeros to blocks of b values, and a block x goes to

        y_j = s_j √(2/b) Σ_t x_t cos(π (2t + 1) j / 2b),   s_0 = √½, s_j = 1 otherwise,

    an isometry: Σ y_j² = Σ x_t². It is a product with a b × b matrix, which for the small blocks
    that keep a gradient's place beats any fast algorithm on a machine that multiplies well.

    Args:
      block: the length b of a block, a power of two up to 1024; a vector shorter than that is one
        block of the next power of two. The work grows with it: 2bn operations.

    Shapes: x float32[n] -> main float32[b · ceil(n/b)], side ().

    Wire: 4b · ceil(n/b) bytes where nothing follows it in a chain.

    Claims: summable; unbiased and lossless to rounding. One non-finite value makes its whole
      block non-finite.

    Differs from the paper: DeMo transforms each tensor in chunks along its axes; here blocks are
      cut from the one vector that all leaves make.

    Raises:
      ValueError: if `block` is not a power of two in 2..1024; while tracing, if the input is
        not a float32 vector.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> y = fg.compress(fg.Dct(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> y.shape, bool(jnp.allclose(y[:4], jnp.array([2.0, 0.0, 0.0, 0.0]), atol=1e-6))
      ((8,), True)

    References:
      Ahmed, Natarajan and Rao, "Discrete Cosine Transform", IEEE Trans. Computers, 1974. Peng,
      Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870.
    """

    block: int = 64

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        _blocks.check_block("Dct", self.block, MAX_BLOCK)

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        _blocks.check_vector("Dct", x)
        block = _blocks.fit(self.block, x.size)
        rows = _whole.rows(x, block)
        return Payload(_blocks.by_chunks(lambda r: _blocks.times(r, basis(block)), rows).ravel())

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        (n,) = like.shape
        block = _blocks.fit(self.block, n)
        rows = payload.main.reshape(-1, block)
        return _blocks.by_chunks(lambda r: _blocks.times(r, basis(block).T), rows).ravel()[:n]

    def reach(self, n: int) -> int:
        return _blocks.fit(self.block, n)

    def accumulate_at(
        self, total: jax.Array, positions: jax.Array, coefficients: jax.Array
    ) -> jax.Array:
        b = self.reach(total.size)
        inverse = basis(b).T
        return _blocks.accumulate_at(
            total, positions, coefficients, lambda rows: _blocks.times(rows, inverse), b, b
        )


def basis(b: int) -> np.ndarray:
    """Column j is the j-th cosine of b values; orthogonal."""
    t, j = np.ogrid[:b, :b]
    waves = np.sqrt(2 / b) * np.cos(np.pi * (2 * t + 1) * j / (2 * b))
    waves[:, 0] *= np.sqrt(0.5)
    return waves.astype(np.float32)
