"""The Walsh-Hadamard transform of blocks, after random signs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Step, Transform
from fftgrad._values import value
from fftgrad.codecs.transforms import _blocks
from fftgrad.ops import _hash, _rows

MAX_BLOCK = 1 << 24
FACTOR = 64


@value
class Hadamard(Transform):
    """Transform: random signs, then the orthonormal Hadamard transform of each block.

    The vector is padded with zeros to blocks of b values, and a block x goes to y = H D x, with D
    a diagonal of signs and H the b × b Hadamard matrix over √b. H² = I, so x = D H y. It makes all
    coefficients of a block about equally large, which suits a quantizer with one scale, and not a
    selector. It takes log b / log 64 products with matrices of at most 64 × 64.

    Args:
      block: the length b of a block, a power of two up to 2^24; a vector shorter than that is one
        block of the next power of two.
      signs: whether to flip signs at random first, drawn from `step.shared`, the same on all
        workers and other ones each step. Without them H maps some vectors, a constant one for
        example, to a single coefficient.

    Wire: x float32[n] -> main float32[b · ceil(n/b)]. The signs are never sent.

    Claims: summable; unbiased and lossless to rounding; an isometry. One non-finite value makes
      its whole block non-finite, and so may finite ones beyond 2^128 / √b: the step is a bad one.

    Differs from the paper: DRIVE rotates each vector whole; here blocks of fixed length are.

    Example:
      >>> x = jnp.array([8.0, 0.0, 0.0, 0.0])
      >>> fg.compress(fg.Hadamard(block=4, signs=False), x).main
      Array([4., 4., 4., 4.], dtype=float32)

    References:
      Vargaftik et al., NeurIPS 2021, arXiv:2105.08339 (DRIVE).
    """

    block: int = 4096
    signs: bool = True

    def __post_init__(self) -> None:
        _blocks.check_block("Hadamard", self.block, MAX_BLOCK)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        _blocks.check_vector("Hadamard", x)
        rows = _rows.rows(x, _blocks.fit(self.block, x.size))
        if self.signs:
            rows = self._flip(rows, step)
        return Compressed(Payload(_blocks.by_chunks(_transform, rows).ravel()))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        rows = payload.main.reshape(-1, _blocks.fit(self.block, n))
        rows = _blocks.by_chunks(_transform, rows)
        if self.signs:
            rows = self._flip(rows, step)
        return rows.ravel()[:n]

    def _flip(self, rows: jax.Array, step: Step) -> jax.Array:
        remedy = " to compress, and the same to decompress, or use signs=False"
        bits = _hash.drawn_bits(self, step.shared, rows.size, remedy).reshape(rows.shape)
        return jnp.where(bits >> 31 == 1, -rows, rows)


def _transform(rows: jax.Array) -> jax.Array:
    count, block = rows.shape
    done = 1
    while done < block:
        factor = min(FACTOR, block // done)
        parts = rows.reshape(count, block // (done * factor), factor, done)
        rows = jnp.einsum("caib,ij->cajb", parts, matrix(factor), precision=lax.Precision.HIGHEST)
        done *= factor
    return rows.reshape(count, block)


def matrix(b: int) -> np.ndarray:
    """Sylvester's construction, scaled to be orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < b:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], np.float32))
    return matrix / np.float32(math.sqrt(b))
