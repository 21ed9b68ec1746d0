"""The discrete cosine transform of blocks or tiles, by products of matrices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Sparse, Step, Transform
from fftgrad._values import value
from fftgrad.codecs.transforms import _blocks, _tiles
from fftgrad.ops import _rows

MAX_BLOCK = 1024


@value
class Dct(Transform):
    """Transform: the orthonormal cosine transform (DCT-II) of blocks of the vector, or of tiles.

    The vector is padded with zeros to blocks of b values, and a block x goes to

        y_j = s_j √(2/b) Σ_t x_t cos(π (2t + 1) j / 2b),   s_0 = √½, s_j = 1 otherwise,

    an isometry: Σ y_j² = Σ x_t². It is a product with a b × b matrix, which for small blocks beats
    any fast algorithm.

    With a `shape` the vector is a matrix of that shape, padded with zeros to tiles of at most b × b
    values, each of which is transformed along both axes. The coefficients of a tile come one after
    the other, so that `ChunkTopK(chunk=transform.tile_size)` chooses in each tile.

    Args:
      block: the length b of a block, or the largest side of a tile: a power of two up to 1024. A
        vector or an axis shorter than that is one block of the next power of two.
      shape: rows and columns of the matrix; the columns of a leaf of more axes are its last axis.
        Use it with `Layout("leaf")` and a rule that gives each leaf its shape.

    Wire: x float32[n] -> main float32[b · ceil(n/b)], or float32[tiles · tile_size].

    Claims: summable; unbiased and lossless to rounding. One non-finite value makes its whole
      block or tile non-finite, and so may finite ones beyond 2^128 / √b: the step is a bad one.

    Differs from the paper: the sides of DeMo's tiles are the largest divisors of a tensor's axes up
      to 64, for a prime axis 1, no transform at all; here axes are padded. Without a shape, blocks
      are cut from the one vector of all leaves.

    Example:
      >>> y = fg.compress(fg.Dct(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> y.shape, bool(jnp.allclose(y[:4], jnp.array([2.0, 0.0, 0.0, 0.0]), atol=1e-6))
      ((8,), True)

    References:
      Ahmed, Natarajan and Rao, "Discrete Cosine Transform", IEEE Trans. Computers, 1974. Peng,
      Quesnelle and Kingma, 2024, arXiv:2411.19870 (DeMo).
    """

    block: int = 64
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _blocks.check_block("Dct", self.block, MAX_BLOCK)
        _tiles.check_shape("Dct", self.shape)

    @property
    def tile_size(self) -> int:
        """Values of one tile, or of a block where there is no shape."""
        return _tiles.Tiling.of(self.shape or (1, self.block), self.block).size

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _blocks.check_vector("Dct", x)
        if self.shape is None:
            block = _blocks.fit(self.block, x.size)
            rows = _rows.rows(x, block)
            coefficients = _blocks.by_chunks(lambda r: _blocks.times(r, basis(block)), rows)
            return Compressed(Payload(coefficients.ravel()))
        _tiles.check_fills(self, x, self.shape)
        tiling = _tiles.Tiling.of(self.shape, self.block)
        tiles = tiling.cut(x)
        return Compressed(
            Payload(_both("aibj,ik,jl->abkl", tiles, tiling.high, tiling.wide).ravel())
        )

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        if self.shape is None:
            block = _blocks.fit(self.block, n)
            rows = payload.main.reshape(-1, block)
            inverse = basis(block).T
            return _blocks.by_chunks(lambda r: _blocks.times(r, inverse), rows).ravel()[:n]
        tiling = _tiles.Tiling.of(self.shape, self.block)
        (down, across), high, wide = tiling.grid, tiling.high, tiling.wide
        tiles = payload.main.reshape(down, across, high, wide)
        return tiling.join(_both("abkl,ik,jl->aibj", tiles, high, wide))

    def reach(self, n: int) -> int:
        return _blocks.fit(self.block, n) if self.shape is None else n

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        b = self.reach(n)
        inverse = basis(b).T
        return _blocks.at_blocks(coefficients, n, lambda r: _blocks.times(r, inverse), b, b)


def basis(b: int) -> np.ndarray:
    """Column j is the j-th cosine of b values; orthogonal."""
    t, j = np.ogrid[:b, :b]
    waves = np.sqrt(2 / b) * np.cos(np.pi * (2 * t + 1) * j / (2 * b))
    waves[:, 0] *= np.sqrt(0.5)
    return waves.astype(np.float32)


def _both(spec: str, tiles: jax.Array, high: int, wide: int) -> jax.Array:
    return jnp.einsum(spec, tiles, basis(high), basis(wide), precision=lax.Precision.HIGHEST)
