"""A vector as the tiles of a matrix, one after the other."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Like
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
