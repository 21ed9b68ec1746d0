"""Tiles of a matrix, one after the other, and how they are cut."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Step, Transform
from fftgrad._values import value
from fftgrad.codecs.transforms import _blocks

Shape = tuple[int, int]


class Tiling(NamedTuple):
    """A matrix of `shape`, padded with zeros to tiles of `high` by `wide` values."""

    shape: Shape
    high: int
    wide: int

    @classmethod
    def of(cls, shape: Shape, block: int) -> "Tiling":
        """Tiles of at most block by block values; a shorter axis is one tile of a power of two."""
        high, wide = (1 if n == 1 else _blocks.fit(block, n) for n in shape)
        return cls(shape, high, wide)

    @property
    def size(self) -> int:
        """Values of one tile."""
        return self.high * self.wide

    @property
    def grid(self) -> Shape:
        """How many tiles there are, down and across."""
        return -(-self.shape[0] // self.high), -(-self.shape[1] // self.wide)

    def cut(self, x: jax.Array) -> jax.Array:
        """The values of the matrix as [tiles down, rows of one, tiles across, columns of one]."""
        (rows, columns), (down, across) = self.shape, self.grid
        fill = [(0, down * self.high - rows), (0, across * self.wide - columns)]
        matrix = jnp.pad(x.reshape(self.shape), fill)
        return matrix.reshape(down, self.high, across, self.wide)

    def join(self, tiles: jax.Array) -> jax.Array:
        """What `cut` made, flat and without the padding."""
        (rows, columns), (down, across) = self.shape, self.grid
        matrix = tiles.reshape(down * self.high, across * self.wide)
        return matrix[:rows, :columns].ravel()


def check_shape(owner: str, shape: Shape | None) -> None:
    """Refuses what is neither rows and columns nor None."""
    if shape is not None and (len(shape) != 2 or min(shape) < 1):
        raise ValueError(
            f"{owner}(shape): must be rows and columns, got {shape}; leave it out for a vector."
        )


def check_fills(owner: object, x: jax.Array, shape: Shape) -> None:
    """Refuses a vector that is not as long as the matrix."""
    if x.size != math.prod(shape):
        raise ValueError(
            f"{owner!r}.compress(x): must have {math.prod(shape)} values, got {x.size}; give each "
            "part the transform of its own shape, by a rule."
        )


def shape_of(like: Like) -> Shape:
    """A leaf as a matrix, whose columns are its last axis."""
    return math.prod(like.shape[:-1]), like.shape[-1] if like.shape else 1


MAX_BLOCK = 1024


@value
class Tiles(Transform):
    """Transform: the values of a matrix in the order of its tiles; they stay what they are.

    A selector of chunks, `ChunkTopK(chunk=transform.tile_size)`, then chooses in each tile.

    Args:
      block: the largest side of a tile: a power of two up to 1024. An axis shorter than that is one
        tile of the next power of two.
      shape: rows and columns of the matrix, as in `Dct`. None: the vector has no shape, and blocks
        take the place of tiles.

    Wire: x float32[n] -> main float32[tiles · tile_size], padded with zeros.

    Claims: summable; unbiased and lossless.

    Differs from the paper: SparseLoCo's code cuts an axis at its largest divisor up to 64, which
      for a prime axis is 1, no tile at all; here axes are padded.

    Example:
      >>> fg.compress(fg.codecs.Tiles(block=2, shape=(2, 3)), jnp.arange(6.0)).main
      Array([0., 1., 3., 4., 2., 0., 5., 0.], dtype=float32)

    References:
      Sarfi et al., 2025, arXiv:2508.15706 (SparseLoCo).
    """

    block: int = 64
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _blocks.check_block("Tiles", self.block, MAX_BLOCK)
        check_shape("Tiles", self.shape)

    @property
    def tile_size(self) -> int:
        """Values of one tile, or of a block where there is no shape."""
        return Tiling.of(self.shape or (1, self.block), self.block).size

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _blocks.check_vector("Tiles", x)
        tiling = self._tiling(x.size)
        check_fills(self, x, tiling.shape)
        return Compressed(Payload(jnp.swapaxes(tiling.cut(x), 1, 2).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        tiling = self._tiling(like.shape[0])
        (down, across), high, wide = tiling.grid, tiling.high, tiling.wide
        tiles = payload.main.reshape(down, across, high, wide)
        return tiling.join(jnp.swapaxes(tiles, 1, 2))

    def _tiling(self, n: int) -> Tiling:
        return Tiling.of(self.shape or (1, n), self.block)
