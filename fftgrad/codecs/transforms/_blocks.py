"""A vector as rows of equal length, for transforms of blocks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fftgrad._contracts import Sparse
from fftgrad._values import check_count
from fftgrad.ops import _scan

CHUNK = 1 << 28
"""Values that go through a transform at a time: 1 GiB, so that with its result and the scratch
space of a library nothing passes 4 GiB, where cuFFT gives up."""


def check_block(owner: str, block: int, most: int) -> None:
    """Refuses what is not a power of two from 2 to `most`."""
    check_count(f"{owner}(block)", block, "use block=64.", least=0)
    if not 2 <= block <= most or block & (block - 1):
        raise ValueError(
            f"{owner}(block): must be a power of two in 2..{most}, got {block}; use block=64."
        )


def fit(block: int, n: int) -> int:
    """The length of a block, at most the least power of two that holds the whole vector."""
    return min(block, 1 << max(1, (n - 1).bit_length()))


def check_vector(owner: str, x: jax.Array) -> None:
    """Refuses what is not a float32 vector."""
    if x.dtype != jnp.float32 or x.ndim != 1:
        raise ValueError(
            f"{owner}.compress(x): must be a float32 vector, got {x.dtype}{list(x.shape)}; put "
            f"{owner} first in the chain."
        )


def by_chunks(transform: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """transform(rows), row by row the same, in pieces of at most CHUNK values."""
    limit = max(1, CHUNK // rows.shape[1])
    if rows.shape[0] <= limit:
        return transform(rows)
    pieces = -(-rows.shape[0] // limit)
    size = -(-rows.shape[0] // pieces)
    padded = jnp.pad(rows, ((0, pieces * size - rows.shape[0]), (0, 0)))
    out = lax.map(transform, padded.reshape(pieces, size, -1))
    return out.reshape(pieces * size, -1)[: rows.shape[0]]


def times(rows: jax.Array, matrix: np.ndarray) -> jax.Array:
    """The product of each row with a matrix, to the precision of float32."""
    # Accelerators would round the factors to fewer bits, and the map would be no isometry.
    return jnp.matmul(rows, matrix, precision=lax.Precision.HIGHEST)


def at_blocks(
    coefficients: Sparse, n: int, inverse: Callable[[jax.Array], jax.Array], block: int, slots: int
) -> Sparse:
    """The inverse transform of a few coefficients, at the blocks that they are in.

    The coefficients of a block are first brought together, because sums in another order would
    differ between replicas.

    Args:
      coefficients: k of them, of the dtype that `inverse` takes.
      n: length of the vector.
      inverse: from rows [., slots] of coefficients to rows float32[., block].
      block: values in a block.
      slots: coefficients in a block.
    """
    positions, values = coefficients
    (k,) = positions.shape
    owner, place = positions // slots, positions % slots
    starts = jnp.concatenate([jnp.ones((1,), bool), owner[1:] != owner[:-1]])
    row = _scan.cumsum(starts.astype(jnp.int32)) - 1
    rows = jnp.zeros((k, slots), values.dtype)
    rows = rows.at[row, place].set(values, indices_are_sorted=True, unique_indices=True)
    # Rows that are nowhere differ, too, and come last.
    beyond = -(-n // block)
    owners = beyond + jnp.arange(k, dtype=jnp.int32)
    owners = owners.at[row].set(jnp.minimum(owner, beyond + row), indices_are_sorted=True)
    at = block * owners[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    return Sparse(at, inverse(rows))
