"""The largest coefficients of each chunk."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._base import Like, Payload, PyTree, Rng, constructor_call
from fftgrad.packing import _codes, _whole
from fftgrad.selectors._top_k import IN_ORDER, keys


@dataclasses.dataclass(frozen=True, repr=False)
class ChunkTopK:
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

    @property
    def summable(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        chunk, k = self._sizes(x.size)
        read, key = keys(x)
        rows = _whole.rows(key(read), chunk)
        if k == 1:
            offsets = jnp.argmax(rows, axis=1)[:, None]
        else:
            _, offsets = lax.top_k(rows.astype(jnp.int32), k)
            offsets = jnp.sort(offsets, axis=1)
        side = _codes.pack(offsets.astype(jnp.uint32).ravel(), (chunk - 1).bit_length())
        return Payload(self.at(x, side), side)

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        return self.accumulate(jnp.zeros(like.shape, payload.main.dtype), payload)

    def accumulate(self, total: jax.Array, payload: Payload) -> jax.Array:
        positions = self.positions(payload.side, total.size)
        return total.at[positions].add(payload.main, **IN_ORDER)

    def at(self, x: jax.Array, side: PyTree) -> jax.Array:
        """The values of `x` at the positions of another payload; zero in the padding."""
        return jnp.take(x, self.positions(side, x.size), mode="fill", fill_value=0)

    def positions(self, side: jax.Array, n: int) -> jax.Array:
        """Where the values of a payload belong, int32[k], ascending; n and beyond is padding."""
        chunk, k = self._sizes(n)
        chunks = -(-n // chunk)
        offsets = _codes.unpack(side, (chunk - 1).bit_length(), chunks * k).astype(jnp.int32)
        start = chunk * (jnp.arange(chunks * k, dtype=jnp.int32) // k)
        return start + jnp.minimum(offsets, chunk - 1)

    def _sizes(self, n: int) -> tuple[int, int]:
        chunk = min(self.chunk, max(2, n))
        return chunk, min(self.k, chunk)
