"""The largest coefficients of each chunk."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Compressed, Payload, PyTree, Selector, Step
from fftgrad._values import constructor_call
from fftgrad.codecs.selectors._top_k import keys
from fftgrad.ops import _rows
from fftgrad.ops.packing import _codes


@dataclasses.dataclass(frozen=True, repr=False)
class ChunkTopK(Selector):
    """Selector: keep the k coefficients of largest magnitude in each chunk.

    The vector is padded with zeros to chunks of c values. A position is an offset in its chunk, so
    it takes few bits, and no part of the vector goes without. With k = 1 it is one pass over the
    data: ScaleCom's chunk-wise quasi-sort.

    Args:
      chunk: c, at least 2; a shorter vector is one chunk.
      k: how many of each chunk are kept, 1 <= k <= chunk.

    Shapes: x float32[n] | complex64[n] -> main of that dtype [k · ceil(n/c)], side uint32 words.

    Wire: k · ceil(n/c) · (32 + ceil(log2 c)) bits, 32 more each if complex.

    Claims: biased; not summable; ||x - C(x)||² <= (1 - k/c) ||x||².

    Raises:
      ValueError: if `chunk` or `k` is out of range.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> x = jnp.array([1.0, -4.0, 0.2, 0.1])
      >>> fg.decompress(fg.ChunkTopK(chunk=2), fg.compress(fg.ChunkTopK(chunk=2), x), x)
      Array([ 0. , -4. ,  0.2,  0. ], dtype=float32)

    References:
      Chen et al., "ScaleCom", NeurIPS 2020, arXiv:2104.11125. Peng, Quesnelle and Kingma, "DeMo",
      2024, arXiv:2411.19870.
    """

    chunk: int
    k: int = 1

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        if self.chunk < 2 or not 1 <= self.k <= self.chunk:
            raise ValueError(
                f"ChunkTopK(chunk, k): must be 1 <= k <= chunk and chunk >= 2, got {self.chunk} "
                f"and {self.k}; use ChunkTopK(chunk=64, k=1)."
            )

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        chunk, k = self._sizes(x.size)
        read, key = keys(x)
        rows = _rows.rows(key(read), chunk)
        if k == 1:
            offsets = jnp.argmax(rows, axis=1)[:, None]
        else:
            _, offsets = lax.top_k(rows.astype(jnp.int32), k)
            offsets = jnp.sort(offsets, axis=1)
        side = _codes.pack(offsets.astype(jnp.uint32).ravel(), (chunk - 1).bit_length())
        return Compressed(Payload(self.at(x, side, step), side))

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        chunk, k = self._sizes(n)
        chunks = -(-n // chunk)
        offsets = _codes.unpack(side, (chunk - 1).bit_length(), chunks * k).astype(jnp.int32)
        start = chunk * (jnp.arange(chunks * k, dtype=jnp.int32) // k)
        return start + jnp.minimum(offsets, chunk - 1)

    def _sizes(self, n: int) -> tuple[int, int]:
        chunk = min(self.chunk, max(2, n))
        return chunk, min(self.k, chunk)
