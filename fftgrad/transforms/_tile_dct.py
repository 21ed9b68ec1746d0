"""The discrete cosine transform of tiles of a matrix."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._base import Like, Payload, Rng, constructor_call
from fftgrad.transforms import _blocks
from fftgrad.transforms._dct import basis


@dataclasses.dataclass(frozen=True, repr=False)
class TileDct:
    """Transform: the orthonormal cosine transform of each tile of a matrix, along both axes.

    The vector is read as a matrix, padded with zeros to tiles of at most b × b values, and each
    tile X goes to Bᵀ X B with B the basis of `Dct`. The coefficients of a tile come one after the
    other, so that `ChunkTopK(chunk=transform.tile_size)` chooses in each tile. Used with
    `scope="leaf"` and a rule that gives each leaf its shape.

    Args:
      shape: rows and columns of the matrix; a leaf of one axis is a single row, of more axes a
        matrix whose columns are its last axis.
      block: largest side b of a tile, a power of two up to 1024.

    Shapes: x float32[rows · columns] -> main float32[tiles · tile_size], side ().

    Wire: 4 bytes a coefficient where nothing follows it in a chain.

    Claims: summable; unbiased and lossless to rounding; an isometry.

    Differs from the paper: DeMo's tiles have the largest divisor of each axis up to 64 as their
      side, which for a prime axis is 1, no transform at all; here the axis is padded.

    Raises:
      ValueError: if an argument is out of range; while tracing, if the input does not fill the
        matrix.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> transform = fg.TileDct(shape=(2, 3), block=2)
      >>> jnp.abs(fg.compress(transform, jnp.ones(6)).main).round(3)
      Array([2., 0., 0., 0., 1., 1., 0., 0.], dtype=float32)

    References:
      Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870.
    """

    shape: tuple[int, int]
    block: int = 64

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        _blocks.check_block("TileDct", self.block, 1024)
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise ValueError(
                f"TileDct(shape): must be rows and columns, got {self.shape}; use (1, n) for a "
                "vector."
            )

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def tile_size(self) -> int:
        """Values of one tile."""
        high, wide = self._tile
        return high * wide

    @property
    def _tile(self) -> tuple[int, int]:
        rows, columns = (1 if n == 1 else _blocks.fit(self.block, n) for n in self.shape)
        return rows, columns

    @property
    def _tiles(self) -> tuple[int, int]:
        return -(-self.shape[0] // self._tile[0]), -(-self.shape[1] // self._tile[1])

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        _blocks.check_vector("TileDct", x)
        if x.size != self.shape[0] * self.shape[1]:
            raise ValueError(
                f"{self!r}.compress(x): must have {self.shape[0] * self.shape[1]} values, got "
                f"{x.size}; give each part the transform of its own shape, by a rule."
            )
        (high, wide), (down, across) = self._tile, self._tiles
        matrix = x.reshape(self.shape)
        fill = [(0, down * high - self.shape[0]), (0, across * wide - self.shape[1])]
        tiles = jnp.pad(matrix, fill).reshape(down, high, across, wide)
        return Payload(_both("aibj,ik,jl->abkl", tiles, self._tile).ravel())

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        (high, wide), (down, across) = self._tile, self._tiles
        tiles = payload.main.reshape(down, across, high, wide)
        matrix = _both("abkl,ik,jl->aibj", tiles, self._tile).reshape(down * high, across * wide)
        return matrix[: self.shape[0], : self.shape[1]].ravel()


def _both(spec: str, tiles: jax.Array, sides: tuple[int, int]) -> jax.Array:
    high, wide = (basis(side) for side in sides)
    return jnp.einsum(spec, tiles, high, wide, precision=lax.Precision.HIGHEST)
