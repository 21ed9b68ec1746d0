"""As many of the selected values as a message of fixed size holds, with their true number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Payload
from fftgrad.ops import _finite
from fftgrad.ops.packing import _bitmap, _indices


class Support(NamedTuple):
    """Which values a message holds: how many, uint32[1], and the code of their positions.

    A slot that holds nothing has a position beyond the vector, so that all positions differ.
    """

    length: jax.Array
    positions: _indices.EliasFano | _indices.Bitmap


def take(x: jax.Array, words: jax.Array, capacity: int) -> Compressed:
    """The first `capacity` values that a bitmap selects; the others are counted as overflow.

    All of them are NaN if anything in `x` is not finite, wherever that is.
    """
    n = x.size
    selected = _bitmap.count(words)
    length = jnp.minimum(selected, capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    used = slot < length
    positions = jnp.where(used, _bitmap.select(_bitmap.rank(words), capacity), n + slot)
    code = _indices.encode_positions(positions, capacity, n + capacity)
    main = jnp.where(used, x[jnp.minimum(positions, n - 1)], 0) + _finite.poison(x)
    side = Support(length.astype(jnp.uint32)[None], code)
    return Compressed(Payload(main, side), selected - length)


def positions(support: Support, capacity: int, n: int) -> jax.Array:
    """The position of each slot, int32[capacity]; n or more where it holds nothing."""
    found = _indices.decode(support.positions, capacity, n + capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where(slot.astype(jnp.uint32) < support.length, found, n + slot)
