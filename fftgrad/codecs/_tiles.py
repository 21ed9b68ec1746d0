"""Transforms of matrices in tiles: the cosine transform, and a reordering by tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Sparse, Step, Transform
from fftgrad._values import check, value
from fftgrad.codecs import _quantizers, _transforms
from fftgrad.ops import _shapes
from fftgrad.ops._rounding import times

Shape = tuple[int, int]

MAX_BLOCK = 1024


class Tiling(NamedTuple):
    """A matrix of `shape`, padded with zeros to tiles of `high` by `wide` values."""

    shape: Shape
    high: int
    wide: int

    @property
    def grid(self) -> Shape:
        """Number of tiles down and across."""
        return -(-self.shape[0] // self.high), -(-self.shape[1] // self.wide)

    def cut(self, x: jax.Array, owner: object) -> jax.Array:
        """Cut a matrix into [tiles down, rows of a tile, tiles across, columns of a tile]."""
        (rows, columns), (down, across) = self.shape, self.grid
        rule, remedy = f"have {rows * columns} values", "give each part its own shape, by a rule."
        check(x.size == rows * columns, f"{owner!r}.compress(x)", rule, x.size, remedy)
        fill = [(0, down * self.high - rows), (0, across * self.wide - columns)]
        matrix = jnp.pad(x.reshape(self.shape), fill)
        return matrix.reshape(down, self.high, across, self.wide)

    def apart(self, tiles: jax.Array) -> jax.Array:
        """Reshape a vector of tiles to [tiles down, tiles across, rows, columns]."""
        return tiles.reshape(*self.grid, self.high, self.wide)

    def join(self, tiles: jax.Array) -> jax.Array:
        """Invert `cut`, flat and without padding."""
        (rows, columns), (down, across) = self.shape, self.grid
        matrix = tiles.reshape(down * self.high, across * self.wide)
        return matrix[:rows, :columns].ravel()


@value
class _Tiled(Transform):
    """Transform of the tiles of a matrix, or of blocks of the vector."""

    block: int = 64
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _transforms.check_block(type(self).__name__, self.block, MAX_BLOCK)

    @property
    def tile_size(self) -> int:
        """Number of values of a tile, or of a block if there is no shape."""
        tiling = self._tiling(self.block)
        return tiling.high * tiling.wide

    def _tiling(self, n: int) -> Tiling:
        """Choose tiles of at most block by block values; pad a shorter axis to a power of two."""
        shape = self.shape or (1, n)
        high, wide = (1 if size == 1 else _transforms.fit(self.block, size) for size in shape)
        return Tiling(shape, high, wide)


@value
class Tiles(_Tiled):
    """Transform: the values of a matrix, unchanged, in the order of its tiles.

    A chunk selector, `ChunkTopK(chunk=transform.tile_size)`, then selects within each tile.

    Args:
      block: largest side of a tile, a power of two up to 1024. A shorter axis is one tile, padded.
      shape: rows and columns of the matrix, as in `Dct`. None: blocks in place of tiles.

    Wire: x float32[n] -> main float32[tiles · tile_size], padded with zeros.

    Claims: summable; unbiased and lossless.

    Differs from the paper: SparseLoCo cuts axes as DeMo does; here they are padded, as in `Dct`.

    Example:
      >>> fg.compress(fg.codecs.Tiles(block=2, shape=(2, 3)), jnp.arange(6.0)).main
      Array([0., 1., 3., 4., 2., 0., 5., 0.], dtype=float32)

    References:
      Sarfi et al., 2025, arXiv:2508.15706 (SparseLoCo).
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _quantizers.check_real("Tiles", x)
        tiles = self._tiling(x.size).cut(x, self)
        return Compressed(Payload(jnp.swapaxes(tiles, 1, 2).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        tiling = self._tiling(like.shape[0])
        return tiling.join(jnp.swapaxes(tiling.apart(payload.main), 1, 2))


@value
class Dct(_Tiled):
    """Transform: the orthonormal cosine transform (DCT-II) of blocks of the vector, or of tiles.

    The vector is padded with zeros to blocks of b values, and a block x becomes

        y_j = s_j √(2/b) Σ_t x_t cos(π (2t + 1) j / 2b),   s_0 = √½, s_j = 1 otherwise,

    by a product with a b × b matrix. This is an isometry: Σ y_j² = Σ x_t².

    With a `shape` the vector is a matrix of that shape, padded with zeros to tiles of at most b × b
    values. Each tile is transformed along both axes. The coefficients of a tile are contiguous, so
    `ChunkTopK(chunk=transform.tile_size)` selects within each tile.

    Args:
      block: length b of a block, or largest side of a tile, a power of two up to 1024. A shorter
        vector or axis is one block of the next power of two.
      shape: rows and columns of the matrix; the columns of a leaf are its last axis. Use it with
        `Bucketing("leaf")` and a rule that gives each leaf its shape.

    Wire: x float32[n] -> main float32[b · ceil(n/b)], or float32[tiles · tile_size].

    Claims: summable; unbiased and lossless up to rounding. One non-finite value makes its whole
      block or tile non-finite, as may finite values beyond 2^128 / √b.

    Differs from the paper: DeMo cuts an axis at its largest divisor up to 64. For a prime length
      this is 1, no transform at all. Here axes are padded.

    Example:
      >>> y = fg.compress(fg.Dct(block=4), jnp.array([1.0, 1.0, 1.0, 1.0, 3.0])).main
      >>> y.shape, bool(jnp.allclose(y[:4], jnp.array([2.0, 0.0, 0.0, 0.0]), atol=1e-6))
      ((8,), True)

    References:
      Ahmed, Natarajan and Rao, "Discrete Cosine Transform", IEEE Trans. Computers, 1974. Peng,
      Quesnelle and Kingma, 2024, arXiv:2411.19870 (DeMo).
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _quantizers.check_real("Dct", x)
        if self.shape is not None:
            tiling = self._tiling(x.size)
            y = _both("aibj,ik,jl->abkl", tiling.cut(x, self), tiling)
            return Compressed(Payload(y.ravel()))
        waves = basis(self.reach(x.size))
        rows = _shapes.rows(x, len(waves))
        return Compressed(Payload(_product(rows, waves).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        if self.shape is not None:
            tiling = self._tiling(n)
            tiles = tiling.apart(payload.main)
            return tiling.join(_both("abkl,ik,jl->aibj", tiles, tiling))
        waves = basis(self.reach(n))
        return _product(payload.main.reshape(-1, len(waves)), waves.T).ravel()[:n]

    def reach(self, n: int) -> int:
        return _transforms.fit(self.block, n) if self.shape is None else n

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        b = self.reach(n)
        inverse = basis(b).T
        return _transforms.at_blocks(coefficients, n, lambda r: times(r, inverse), b, b)


def basis(b: int) -> np.ndarray:
    """Return the orthogonal matrix whose column j is the j-th cosine of b values."""
    t, j = np.ogrid[:b, :b]
    waves = np.sqrt(2 / b) * np.cos(np.pi * (2 * t + 1) * j / (2 * b))
    waves[:, 0] *= np.sqrt(0.5)
    return waves.astype(np.float32)


def _product(rows: jax.Array, matrix: np.ndarray) -> jax.Array:
    return _transforms.by_chunks(lambda r: times(r, matrix), rows)


def _both(spec: str, tiles: jax.Array, tiling: Tiling) -> jax.Array:
    high, wide = basis(tiling.high), basis(tiling.wide)
    return jnp.einsum(spec, tiles, high, wide, precision=lax.Precision.HIGHEST)
