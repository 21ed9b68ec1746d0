"""The largest coefficients of each chunk."""

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Compressed, Payload, PyTree, Selector, Step
from fftgrad._values import check_count, value
from fftgrad.codecs.selectors._top_k import keys
from fftgrad.ops import _rows
from fftgrad.ops.packing import _codes, _indices


@value
class ChunkTopK(Selector):
    """Selector: keep the k coefficients of largest magnitude in each chunk.

    The vector is padded with zeros to chunks of c values, and no part of it goes without. With
    k = 1 it is one pass over the data: ScaleCom's chunk-wise quasi-sort. Positions travel as
    offsets in their chunks, or all together in Elias-Fano code or as a bitmap, whichever is
    shortest; where all are kept, not at all.

    Args:
      chunk: c, at least 2; a shorter vector is one chunk.
      k: how many of each chunk are kept, 1 <= k <= chunk.

    Wire: x float32[n] | complex64[n] -> main of that dtype [m], m = k · ceil(n/c); side at most
      m · min(ceil(log2 c), 2 + floor(log2 c/k)) bits of positions; 0 if k = c.

    Claims: biased; not summable; ||x - C(x)||² <= (1 - k/c) ||x||².

    Example:
      >>> x, codec = jnp.array([1.0, -4.0, 0.2, 0.1]), fg.ChunkTopK(chunk=2)
      >>> fg.decompress(codec, fg.compress(codec, x), x)
      Array([ 0. , -4. ,  0.2,  0. ], dtype=float32)

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125 (ScaleCom). Peng, Quesnelle and Kingma, 2024,
      arXiv:2411.19870 (DeMo).
    """

    chunk: int
    k: int = 1

    def __post_init__(self) -> None:
        check_count("ChunkTopK(chunk)", self.chunk, "use ChunkTopK(chunk=64).", least=2)
        check_count("ChunkTopK(k)", self.k, "use k=1.", 1, self.chunk)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        chunk, k = self._sizes(x.size)
        read, key = keys(x)
        rows = _rows.rows(key(read), chunk)
        if k == 1:
            offsets = jnp.argmax(rows, axis=1)[:, None]
        else:
            _, offsets = lax.top_k(rows.astype(jnp.int32), k)
            offsets = jnp.sort(offsets, axis=1)
        side = _encode(offsets.astype(jnp.int32), chunk)
        return Compressed(Payload(self.at(x, side, step), side))

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        chunk, k = self._sizes(n)
        return _decode(side, -(-n // chunk), chunk, k)

    def _sizes(self, n: int) -> tuple[int, int]:
        chunk = min(self.chunk, max(2, n))
        return chunk, min(self.k, chunk)


def _encode(offsets: jax.Array, chunk: int) -> PyTree:
    """The code of ascending offsets int32[chunks, k] in chunks of that many values."""
    chunks, k = offsets.shape
    if k == chunk:
        return ()
    if _have_offsets(chunks, chunk, k):
        return _codes.pack(offsets.astype(jnp.uint32).ravel(), (chunk - 1).bit_length())
    starts = chunk * jnp.arange(chunks, dtype=jnp.int32)[:, None]
    return _indices.encode_positions((starts + offsets).ravel(), chunks * k, chunks * chunk)


def _decode(side: PyTree, chunks: int, chunk: int, k: int) -> jax.Array:
    """The positions int32[chunks · k] in the whole vector."""
    numbers = jnp.arange(chunks * k, dtype=jnp.int32)
    if k == chunk:
        return numbers
    if _have_offsets(chunks, chunk, k):
        offsets = _codes.unpack(side, (chunk - 1).bit_length(), chunks * k).astype(jnp.int32)
        return chunk * (numbers // k) + jnp.minimum(offsets, chunk - 1)
    return _indices.decode(side, chunks * k, chunks * chunk)


def _have_offsets(chunks: int, chunk: int, k: int) -> bool:
    """Whether offsets are shorter than a code of all positions."""
    apart = _codes.words_for(chunks * k, (chunk - 1).bit_length())
    return apart <= _indices.words_for(chunks * k, chunks * chunk)
