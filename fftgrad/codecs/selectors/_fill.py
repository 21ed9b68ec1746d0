"""What fits a message: candidates, levels at which they are sent, and the finest that fits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad.codecs.selectors import _largest
from fftgrad.codecs.selectors._top_k import keys
from fftgrad.ops import _finite, _scan
from fftgrad.ops.packing import _bitmap, _exp_golomb

ORDERS = 16
ORDER_SAMPLE = 8
PER_OCTAVE, CUTS, OCTAVES = 32, 8, 16
"""Of the steps that are tried: finenesses an octave, cuts between two of them, octaves."""

LEVELS = PER_OCTAVE * CUTS * OCTAVES
LEVEL_BITS, DIGIT_BITS = 12, 3

SIGN = 1
"""The order of the codes of levels: their lowest bit is a sign."""

GROWTH = 1.5
"""About how many octaves of words an octave of levels takes."""

TINY = float(jnp.finfo(jnp.float32).tiny)

LEAST = -110
"""No scale is below 2**-110, or the finest steps would be no normal numbers."""


class Candidates(NamedTuple):
    """The largest coefficients, in order of position.

    Attributes:
      positions: int32[k].
      magnitude: float32[k], below 2.
      negative: int32[k], 1 for a minus.
      scale: what the magnitudes are multiples of, float32[]; NaN if anything is not finite.
    """

    positions: jax.Array
    magnitude: jax.Array
    negative: jax.Array
    scale: jax.Array

    @classmethod
    def of(cls, x: jax.Array, most: int) -> "Candidates":
        if most == x.size:
            positions = lax.iota(jnp.int32, x.size)
        else:
            # Kept: it is read many times, each of which would look for it in all of the leaves.
            x = lax.optimization_barrier(x)
            positions = _bitmap.select(_largest.largest(*keys(x), most), most)
            x = x[positions]
        top = _finite.largest(x)
        # By powers of two, so that nothing is rounded; in two steps, because one may be too large.
        binade = (lax.bitcast_convert_type(top, jnp.int32) >> 23) - 127
        binade = jnp.where(top >= TINY, jnp.maximum(binade, LEAST), 0)
        half = binade // 2
        one, other = _power(half), _power(binade - half)
        scaled = (jnp.abs(x) * (1.0 / one)) * (1.0 / other)
        scale = jnp.where(jnp.isfinite(top), one * other, jnp.nan)
        return cls(positions, scaled, (x < 0).astype(jnp.int32), scale)

    def at(self, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which coefficients a level sends, bool[k], and their q, int32[k], at least 1."""
        index, k = lax.iota(jnp.int32, self.magnitude.size), self.magnitude.size
        fineness, cut = level // CUTS, level % CUTS
        # One part after the other comes to the next fineness, or equal ones would come all at once.
        reaches = self.magnitude * resolution(fineness)
        ahead = index < -(-k // CUTS) * cut
        kept = jnp.where(ahead, self.magnitude * resolution(fineness + 1), reaches) >= 1.0
        return kept, jnp.maximum(reaches.astype(jnp.int32), 1)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent, exactly."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def resolution(fineness: jax.Array) -> jax.Array:
    """How many steps there are to one: from a half on, 32 to an octave, in a few bits each."""
    bits = (126 * PER_OCTAVE + fineness) << 24 - PER_OCTAVE.bit_length()
    return lax.bitcast_convert_type(bits, jnp.float32)


def gaps_of(positions: jax.Array, kept: jax.Array) -> jax.Array:
    """How many coefficients lie between each one and the last one before it that is kept."""
    last = _scan.cummax(jnp.where(kept, positions + 1, 0))
    return positions - jnp.pad(last, (1, 0))[:-1]


def order_of(candidates: Candidates) -> jax.Array:
    """The order that codes the gaps of all candidates in the fewest bits, by some of them."""
    gaps = jnp.diff(candidates.positions, prepend=-1)[::ORDER_SAMPLE] - 1
    orders = jnp.arange(ORDERS, dtype=jnp.int32)[:, None]
    bits = 2 * _exp_golomb.exponents(gaps[None], orders) + orders
    return jnp.argmin(jnp.sum(bits, axis=1, dtype=jnp.int32)).astype(jnp.int32)


def finest(candidates: Candidates, order: jax.Array, words: int) -> jax.Array:
    """The highest level whose codes fit; nothing is sent at level zero."""
    # The words grow with the level: to send one more takes more than its gap saves.
    return lax.platform_dependent(
        candidates,
        order,
        cpu=functools.partial(_by_growth, words=words),
        default=functools.partial(_by_digits, words=words),
    )


def _words_at(candidates: Candidates, order: jax.Array, level: jax.Array) -> jax.Array:
    """How many words the codes of a level take."""
    kept, q = candidates.at(level)
    gaps = gaps_of(candidates.positions, kept)
    exponents = _exp_golomb.exponents(gaps, order) + _exp_golomb.exponents(q - 1, 0)
    total = jnp.sum(jnp.where(kept, exponents, 0), dtype=jnp.int32)
    count = jnp.sum(kept, dtype=jnp.int32)
    return _exp_golomb.words_for(2 * count, total, (order + 1) * count)


def _by_digits(candidates: Candidates, order: jax.Array, words: int) -> jax.Array:
    """It, three bits at a time, without a loop of unknown length."""
    words_at = jax.vmap(functools.partial(_words_at, candidates, order))

    def settle(i: jax.Array, level: jax.Array) -> jax.Array:
        shift = LEVEL_BITS - DIGIT_BITS * (i + 1)
        higher = level + (jnp.arange(1, 1 << DIGIT_BITS) << shift)
        return level + (jnp.sum(words_at(higher) <= words, dtype=jnp.int32) << shift)

    zero = _axes.vary_like(jnp.int32(0), candidates.magnitude)
    return lax.fori_loop(0, LEVEL_BITS // DIGIT_BITS, settle, zero)


class _Bracket(NamedTuple):
    """Levels, of which the lower one fits and the higher one does not; and what is known of them.

    Attributes:
      low: int32[]; high: int32[]; next: the one to try, int32[]; turn: int32[].
      tried: the one before, int32[].
      excess: by how many octaves its words were too many, float32[].
      slope: octaves of words to a level, float32[].
    """

    low: jax.Array
    high: jax.Array
    next: jax.Array
    turn: jax.Array
    tried: jax.Array
    excess: jax.Array
    slope: jax.Array


def _by_growth(candidates: Candidates, order: jax.Array, words: int) -> jax.Array:
    """It, in a loop of few turns, because the words grow evenly with the level: by secants."""
    at_first = GROWTH / (PER_OCTAVE * CUTS)

    def narrow(b: _Bracket) -> _Bracket:
        found = _words_at(candidates, order, b.next)
        fits = found <= words
        low, high = jnp.where(fits, b.next, b.low), jnp.where(fits, b.high, b.next)
        excess = jnp.log2(jnp.maximum(found, 1).astype(jnp.float32) / words)
        slope = (excess - b.excess) / (b.next - b.tried).astype(jnp.float32)
        slope = jnp.clip(slope, at_first / 3, at_first * 10)
        slope = jnp.where(b.turn == 0, at_first, slope)
        # Rounded to the far side, so that the bracket closes from both.
        away = -excess / slope
        away = jnp.where(fits, jnp.ceil(away), jnp.floor(away)).astype(jnp.int32)
        # Secants of what grows unevenly may close in from one side only.
        halve = (b.turn % 5 == 4) & (low > 0) & (high < LEVELS)
        following = jnp.where(halve, (low + high) // 2, b.next + away)
        following = jnp.clip(following, low + 1, high - 1)
        return _Bracket(low, high, following, b.turn + 1, b.next, excess, slope)

    zero = _axes.vary_like(jnp.int32(0), candidates.magnitude)
    # All candidates together take about half of the words, where each has one level.
    least = jnp.maximum(jnp.min(candidates.magnitude), 2.0**-OCTAVES)
    first = jnp.round(-jnp.log2(least) * (PER_OCTAVE * CUTS)).astype(jnp.int32)
    unknown = zero.astype(jnp.float32)
    start = _Bracket(
        zero, zero + LEVELS, jnp.clip(first, 1, LEVELS - 1), zero, zero, unknown, unknown
    )
    return lax.while_loop(lambda b: b.high - b.low > 1, narrow, start).low
