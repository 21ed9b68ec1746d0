"""A sum of small integers over the workers, several to a word, by one all-reduce."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fftgrad._contracts import Channel
from fftgrad.ops import _codes


def base(levels: int, workers: int) -> int:
    """How many values the sum of so many integers in -levels ... levels has."""
    return 2 * levels * workers + 1


def words(sizes: Sequence[int], levels: int, workers: int) -> int:
    """How many words vectors of these sizes fill."""
    return sum(_codes.words_for_digits(size, base(levels, workers)) for size in sizes)


def add(
    vectors: Sequence[jax.Array], levels: int, channel: Channel, flags: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The sums over the workers of vectors of integers, and how many workers say yes to each flag.

    Args:
      vectors: float32[n] of integers in -levels ... levels.
      levels: the largest magnitude.
      channel: of the workers.
      flags: bool[], each a word behind those of the vectors.

    Returns:
      Integers in float32, in -levels · workers ... levels · workers; uint32[] for each flag.
    """
    workers = channel.workers
    many = base(levels, workers)
    packed = [_codes.pack_digits((vector + levels).astype(jnp.uint32), many) for vector in vectors]
    words = [flag.astype(jnp.uint32)[None] for flag in flags]
    total = channel.sum(jnp.concatenate([*packed, *words]))
    sums: list[jax.Array] = []
    start = 0
    for vector in vectors:
        stop = start + _codes.words_for_digits(vector.size, many)
        digits = _codes.unpack_digits(total[start:stop], many, vector.size)
        sums.append(digits.astype(jnp.float32) - levels * workers)
        start = stop
    return sums, [total[start + i] for i in range(len(flags))]
