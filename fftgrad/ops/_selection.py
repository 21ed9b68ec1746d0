"""Exact selection of the k largest of n keys, without a sort or a scan of n values.

On a CPU, passes over the data are slow and branches are cheap. So a sample of the keys gives a
bracket, two keys around the k-th largest. One pass compares all keys with both ends, and counts
check that the k-th largest key and few others are inside. The keys inside are compacted and
bisected bit by bit. If the check fails (once in ten thousand times on random data, more often for
short keys of similar values), all keys first bisect the bracket, in at most 31 more passes.

On an accelerator, the host waits at each branch. So one pass for each four bits finds the k-th
largest key digit by digit, and another pass compares all keys with it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad.ops import _codes, _count, _platform, _positions, _random, _shapes

SAMPLE = 1 << 15
"""Number of sampled keys that give the bracket. Vectors of at most this size need no bracket."""

SIGMAS = 4.0
"""Half the width of the bracket, in standard deviations of the rank of a sampled key."""

KEY_BITS = 31
DIGIT_BITS = 4
ROW = 128

Key = Callable[[jax.Array], jax.Array]
"""Elementwise map to uint32 below 2**31. It is fused into the passes, so it must be cheap."""


def keys(x: jax.Array, bits: int = KEY_BITS) -> tuple[jax.Array, Key]:
    """Return an array, and an elementwise map to keys that grow with |x_i|; 31 bits if complex."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        whole = lambda x: _bits(jnp.abs(x.astype(jnp.float32)))  # noqa: E731
        return x, whole if bits == KEY_BITS else lambda x: whole(x) >> KEY_BITS - bits
    # The energies take half the memory of x, so store them rather than recompute them in each pass.
    return _energy_bits(x), lambda energy: energy


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of non-negative floats, which have the same order as the floats."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def _energy_bits(z: jax.Array) -> jax.Array:
    """Return |z_i|² in 9 bits of exponent and 22 of mantissa; subnormal values count as zero.

    Each value is scaled by a power of two, so that no square overflows or underflows.
    """
    re, im = jnp.abs(z.real), jnp.abs(z.imag)
    exponent = jnp.maximum(_bits(re), _bits(im)) >> 23
    scale = lax.bitcast_convert_type((255 - exponent) << 23, jnp.float32)
    square = jnp.square(re * scale) + jnp.square(im * scale)  # in [4, 32)
    bits = (_bits(square) >> 1) + ((2 * exponent - 130) << 22)
    bits = jnp.where(exponent == 0, 0, jnp.where(exponent == 255, jnp.uint32(0x7FFFFFFF), bits))
    return lax.optimization_barrier(bits)  # keeps XLA from recomputing it for each reader


class Bracket(NamedTuple):
    """Two keys, low < high, and the numbers of keys >= low and >= high."""

    low: jax.Array
    high: jax.Array
    from_low: jax.Array
    from_high: jax.Array


def largest(x: jax.Array, key: Key, k: int, bits: int = KEY_BITS) -> _positions.Ranked:
    """Return the bitmap of the k < n largest of key(x) < 2**bits; for equal keys, the first k."""

    def of_all(x: jax.Array) -> _positions.Ranked:
        return _best(key(x), jnp.int32(k), bits=bits)

    if x.size <= SAMPLE:
        return of_all(x)
    by_bracket = functools.partial(_by_bracket, key=key, k=k)
    return _platform.dependent(x, cpu=by_bracket, default=of_all)


def largest_of_rows(keys: jax.Array, k: int) -> jax.Array:
    """Return the positions of the k largest keys of each row, ascending, int32[rows, k]."""

    def of_row(row: jax.Array) -> jax.Array:
        return _positions.select(_best(row, jnp.int32(k), size=keys.size), k)

    return jax.vmap(of_row)(keys)


def _by_bracket(x: jax.Array, key: Key, k: int) -> _positions.Ranked:
    """Return the bitmap of the k largest, by a search only among the keys inside a bracket."""
    guess, capacity = _guess(x, key, k)
    low_words, high_words = _sides(x, key, guess.low, guess.high)
    bracket = guess._replace(
        from_low=_positions.count(low_words), from_high=_positions.count(high_words)
    )

    def narrowed() -> tuple[Bracket, jax.Array, jax.Array]:
        exact = _narrow(x, key, k, bracket, capacity)
        low_words, high_words = _sides(x, key, exact.low, exact.high)
        return exact, low_words, high_words

    holds = (bracket.from_high < k) & (k <= bracket.from_low) & _is_narrow(bracket, capacity)
    bracket, low_words, high_words = lax.cond(
        holds, lambda: (bracket, low_words, high_words), narrowed
    )
    inside, wanted = low_words & ~high_words, k - bracket.from_high

    def best() -> jax.Array:
        positions = _positions.select(_positions.rank(inside), capacity)
        exists = jnp.arange(capacity, dtype=jnp.int32) < bracket.from_low - bracket.from_high
        keys = jnp.where(exists, key(x[positions]), 0)
        keep = exists & _codes.unpack_mask(_best(keys, wanted).words, capacity)
        return _positions.bitmap_of(positions, keep, x.size)

    all_equal = bracket.high - bracket.low == 1

    def first() -> jax.Array:
        return _positions.first(_positions.rank(inside), wanted).words

    return _positions.rank(high_words | lax.cond(all_equal, first, best))


def _guess(x: jax.Array, key: Key, k: int) -> tuple[Bracket, int]:
    """Return a bracket that probably contains the k-th largest, and the capacity for its keys."""
    n = x.size
    least = _axes.vary_like(jnp.uint32(0), x)
    most = _axes.vary_like(jnp.uint32(1 << KEY_BITS), x)
    bracket = Bracket(least, most, jnp.int32(n), jnp.int32(0))
    expected = SAMPLE * k / n
    margin = SIGMAS * math.sqrt(expected * (1 - k / n)) + SIGMAS
    above, below = math.ceil(expected + margin), math.floor(expected - margin)
    sample = key(x[sampled(n, SAMPLE)])
    if above <= SAMPLE:
        bracket = bracket._replace(low=_kth_largest(sample, above))
    if below >= 1:
        bracket = bracket._replace(high=_kth_largest(sample, below) + 1)
    # Short keys come in groups of equal keys. For normal data, an eighth more room is enough.
    width = 9 * (min(above, SAMPLE) - max(below, 0) + 1) // 8
    return bracket, min(n, math.ceil(n / SAMPLE * (width + SIGMAS * math.sqrt(width))))


def sampled(n: int, count: int) -> jax.Array:
    """Return random positions int32[count]; a stride would sample one phase of periodic data."""
    return (_random.bits(jnp.uint32(0), jnp.uint32(0), count) % jnp.uint32(n)).astype(jnp.int32)


def _sides(x: jax.Array, key: Key, low: jax.Array, high: jax.Array) -> tuple[jax.Array, ...]:
    """Return the bitmaps of the keys >= low and of the keys >= high."""
    return _codes.pack_masks(key(x) >= low, key(x) >= high)


def _is_narrow(bracket: Bracket, capacity: int) -> jax.Array:
    """Return True if at most `capacity` keys are inside the bracket, or if these are all equal."""
    inside = bracket.from_low - bracket.from_high
    return (inside <= capacity) | (bracket.high - bracket.low == 1)


def _narrow(x: jax.Array, key: Key, k: int, guess: Bracket, capacity: int) -> Bracket:
    """Split the range of all keys at the ends of `guess`, then bisect until it is narrow enough."""

    def split(bracket: Bracket, at: jax.Array, from_at: jax.Array) -> Bracket:
        low, high, from_low, from_high = bracket
        enough, inside = from_at >= k, (low < at) & (at < high)
        up, down = enough & inside, ~enough & inside
        return Bracket(
            jnp.where(up, at, low),
            jnp.where(down, at, high),
            jnp.where(up, from_at, from_low),
            jnp.where(down, from_at, from_high),
        )

    def halve(bracket: Bracket) -> Bracket:
        middle = bracket.low + (bracket.high - bracket.low) // 2
        return split(bracket, middle, _positions.count(*_codes.pack_masks(key(x) >= middle)))

    widest = Bracket(
        jnp.zeros_like(guess.low),
        jnp.full_like(guess.high, 1 << KEY_BITS),
        jnp.full_like(guess.from_low, x.size),
        jnp.zeros_like(guess.from_high),
    )
    start = split(widest, guess.low, guess.from_low)
    start = split(start, guess.high, guess.from_high)
    return lax.while_loop(lambda bracket: ~_is_narrow(bracket, capacity), halve, start)


def _best(
    keys: jax.Array, wanted: jax.Array, size: int = 0, bits: int = KEY_BITS
) -> _positions.Ranked:
    """Return the bitmap of the `wanted` largest keys; of equal keys, the first are selected.

    If the keys are one row of a larger array, `size` is the number of keys in the array.
    """
    threshold = _kth_largest(keys, wanted, size, bits)
    # Concatenate both bitmaps, larger keys first, so that one scan ranks them.
    both = jnp.concatenate(_codes.pack_masks(keys > threshold, keys == threshold))
    words, before = _positions.first(_positions.rank(both), wanted)
    half = words.size // 2
    # In the second half, the scan also counted the before[half] bits of the first half.
    return _positions.Ranked(
        words[:half] | words[half:], before[:half] + before[half:] - before[half]
    )


def _kth_largest(
    keys: jax.Array, wanted: jax.Array | int, size: int = 0, bits: int = KEY_BITS
) -> jax.Array:
    """Return the largest t such that at least `wanted` keys are >= t."""
    # For few values, a short program matters more than the number of passes.
    short = max(size, keys.size) <= SAMPLE
    at_once = functools.partial(_kth_largest_at_once, short=short, bits=bits)
    return _platform.dependent(keys, jnp.int32(wanted), cpu=_kth_largest_by_rows, default=at_once)


def _kth_largest_by_rows(keys: jax.Array, wanted: jax.Array) -> jax.Array:
    """Find two bits of t per turn of a loop."""
    rows = _shapes.rows(keys, ROW)

    def settle(step: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = jnp.uint32(KEY_BITS - 1 - 2 * step)
        tries = [threshold + (jnp.uint32(digit) << shift) for digit in (1, 2, 3)]
        return threshold + (_digit([rows >= t for t in tries], wanted) << shift)

    zero = _axes.vary_like(jnp.uint32(0), keys)
    return lax.fori_loop(0, (KEY_BITS + 1) // 2, settle, zero)


def _kth_largest_at_once(keys: jax.Array, wanted: jax.Array, short: bool, bits: int) -> jax.Array:
    """Find four bits of t per pass and three small kernels, without a loop."""
    rows = _shapes.rows(keys, _count.LONG_ROW).astype(jnp.int32)
    threshold = _axes.vary_like(jnp.int32(0), keys)
    for shift in reversed(range(0, bits, DIGIT_BITS)):
        steps = range(1 << shift, min(1 << shift + DIGIT_BITS, 1 << bits), 1 << shift)
        if short:
            digits = lax.iota(jnp.int32, len(steps))[:, None, None] + 1
            reached = (rows - threshold)[None] >= digits << shift
            digit = jnp.sum(jnp.sum(reached, axis=(1, 2), dtype=jnp.int32) >= wanted)
        else:
            # Compare with constants, because each computed threshold would be a separate kernel.
            digit = _digit([rows - threshold >= step for step in steps], wanted)
        threshold = threshold + (digit.astype(jnp.int32) << shift)
    return threshold.astype(jnp.uint32)


def _digit(reached: Sequence[jax.Array], wanted: jax.Array) -> jax.Array:
    """Return the largest digit that at least `wanted` keys reach, by the masks for 1, 2, ..."""
    found = _count.counts(reached)
    return sum(((count >= wanted).astype(jnp.uint32) for count in found), jnp.uint32(0))
