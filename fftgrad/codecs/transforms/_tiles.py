"""The values of a matrix, tile by tile."""

import dataclasses

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Step, Transform
from fftgrad._values import constructor_call
from fftgrad.codecs.transforms import _blocks, _tiling

MAX_BLOCK = 1024


@dataclasses.dataclass(frozen=True, repr=False)
class Tiles(Transform):
    """Transform: the values of a matrix in the order of its tiles; they stay what they are.

    A selector of chunks, `ChunkTopK(chunk=transform.tile_size)`, then chooses in each tile.

    Args:
      block: the largest side of a tile: a power of two up to 1024. An axis shorter than that is one
        tile of the next power of two.
      shape: rows and columns of the matrix; a leaf of more axes is a matrix whose columns are its
        last axis. None: the vector has no shape, and blocks take the place of tiles. Use it with
        `Layout("leaf")` and a rule that gives each leaf its shape.

    Shapes: x float32[n] -> main float32[tiles · tile_size], padded with zeros; side ().

    Wire: 4 bytes a value where nothing follows it in a chain.

    Claims: summable; unbiased and lossless.

    Differs from the paper: SparseLoCo's code cuts an axis at its largest divisor up to 64, which
      for a prime axis is 1, no tile at all; here axes are padded.

    Raises:
      ValueError: if `block` is not a power of two in 2..1024, or `shape` is not rows and columns;
        while tracing, if the input is not a float32 vector, or does not fill the matrix.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> fg.compress(fg.codecs.Tiles(block=2, shape=(2, 3)), jnp.arange(6.0)).main
      Array([0., 1., 3., 4., 2., 0., 5., 0.], dtype=float32)

    References:
      Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
      arXiv:2508.15706.
    """

    block: int = 64
    shape: tuple[int, int] | None = None

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        _blocks.check_block("Tiles", self.block, MAX_BLOCK)
        _tiling.check_shape("Tiles", self.shape)

    @property
    def tile_size(self) -> int:
        """Values of one tile, or of a block where there is no shape."""
        return _tiling.Tiling.of(self.shape or (1, self.block), self.block).size

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _blocks.check_vector("Tiles", x)
        tiling = self._tiling(x.size)
        _tiling.check_fills(self, x, tiling.shape)
        return Compressed(Payload(jnp.swapaxes(tiling.cut(x), 1, 2).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        tiling = self._tiling(like.shape[0])
        (down, across), high, wide = tiling.grid, tiling.high, tiling.wide
        tiles = payload.main.reshape(down, across, high, wide)
        return tiling.join(jnp.swapaxes(tiles, 1, 2))

    def _tiling(self, n: int) -> _tiling.Tiling:
        return _tiling.Tiling.of(self.shape or (1, n), self.block)
