"""Selector of as many of the largest coefficients as fit into a payload of fixed size."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Compressed, Like, Payload, PyTree, Selector, Sparse, Step
from fftgrad._values import check_within, value
from fftgrad.codecs import _quantizers, _top_k
from fftgrad.ops import (
    _count,
    _exp_golomb,
    _finite,
    _platform,
    _positions,
    _selection,
    _shapes,
    _wire,
)
from fftgrad.ops._exp_golomb import Arrays

ORDERS, ORDER_GAPS = 16, 1 << 12
"""The order is fitted to all gaps, or to a random sample of ORDER_GAPS gaps."""

CUT_BITS = 3
PER_OCTAVE, CUTS, OCTAVES = 32, 1 << CUT_BITS, 16
"""Values of the step T (finenesses) per octave, cuts per fineness, and octaves."""

LEVELS = PER_OCTAVE * CUTS * OCTAVES
LEVEL_BITS, DIGIT_BITS = 12, 3

SIGN = 1
"""Order of the codes of 2 (q - 1) + sign, whose lowest bit is the sign."""

GROWTH = 1.5
"""If T is halved, the number of words grows by a factor of about 2**GROWTH."""

TINY = float(jnp.finfo(jnp.float32).tiny)

ROUGH_BITS = 16
"""Candidates are the largest by the exponent and 8 bits of the mantissa, then by position."""

COLUMN, BLOCK, SAMPLED = 15, 256, 8
"""Candidates per column, and columns per block; the sample holds one in SAMPLED blocks."""

SUMMED, SUM_BITS = 64, 17
"""Exponents of SUMMED columns add up to less than 2**SUM_BITS; kept candidates count above."""

FEW = 1 << 11
"""Least number of words of a sample."""

LEAST_EXPONENT = -110
"""Least exponent of a scale, so that the smallest T is a normal number."""

MISSING = 2**31 - 1  # in place of a position, for a column without kept candidates


class Candidates(NamedTuple):
    positions: jax.Array  # int32[k]
    magnitude: jax.Array  # float32[k], below 2
    negative: jax.Array  # int32[k], 1 if the coefficient is negative
    scale: jax.Array  # unit of the magnitudes; NaN if a value is not finite

    @classmethod
    def of(cls, x: jax.Array, most: int) -> "Candidates":
        if most == x.size:
            positions = lax.iota(jnp.int32, x.size)
        else:
            # Without the barrier, XLA concatenates the leaves again for each reader of the vector.
            x = lax.optimization_barrier(x)
            x, key = _selection.keys(x, ROUGH_BITS)
            positions = _positions.select(_selection.largest(x, key, most, ROUGH_BITS), most)
            x = x[positions]
        top = _finite.largest(x)
        # Multiply by two powers of two, which is exact, because their product may overflow.
        binade = (lax.bitcast_convert_type(top, jnp.int32) >> 23) - 127
        binade = jnp.where(top >= TINY, jnp.maximum(binade, LEAST_EXPONENT), 0)
        half = binade // 2
        one, other = _power(half), _power(binade - half)
        scaled = (jnp.abs(x) * (1.0 / one)) * (1.0 / other)
        scale = jnp.where(jnp.isfinite(top), one * other, jnp.nan)
        return cls(positions, scaled, (x < 0).astype(jnp.int32), scale)

    def at(self, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return True for the coefficients that a level sends, bool[k], and q >= 1, int32[k]."""
        index = lax.iota(jnp.int32, self.magnitude.size)
        cut, units = _at_level(level, -(-self.magnitude.size // CUTS))
        reaches, kept = _reach(self.magnitude, index < cut, units)
        # Round down by a shift, because XLA for CPUs does not vectorize a conversion to integers.
        bits = lax.bitcast_convert_type(jnp.maximum(reaches, 1.0), jnp.int32)
        return kept, (bits & (1 << 23) - 1 | 1 << 23) >> 150 - (bits >> 23)


def _power(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent, exactly."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def resolution(fineness: jax.Array) -> jax.Array:
    """Return scale / T: 1/2 for fineness 0, then 32 evenly spaced values in each octave."""
    bits = (126 * PER_OCTAVE + fineness) << 24 - PER_OCTAVE.bit_length()
    return lax.bitcast_convert_type(bits, jnp.float32)


def gaps_of(positions: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the number of positions between each candidate and the kept candidate before it."""
    last = _count.cummax(jnp.where(kept, positions + 1, 0))
    return positions - jnp.pad(last, (1, 0))[:-1]


def order_of(candidates: Candidates) -> jax.Array:
    """Return the order with the fewest bits for the gaps of a sample of the candidates."""
    at = candidates.positions
    few = at.size <= ORDER_GAPS
    index = lax.iota(jnp.int32, at.size) if few else _selection.sampled(at.size, ORDER_GAPS)
    gaps = at[index] - jnp.where(index > 0, at[index - 1], -1) - 1
    orders = jnp.arange(ORDERS, dtype=jnp.int32)[:, None]
    bits = 2 * _exp_golomb.exponents(gaps[None], orders) + orders
    bits = jnp.where(candidates.magnitude[index] > 0, bits, 0)  # zeros are never sent
    return jnp.argmin(jnp.sum(bits, axis=1, dtype=jnp.int32)).astype(jnp.int32)


def finest(candidates: Candidates, order: jax.Array, words: int) -> jax.Array:
    """Return the highest level whose codes fit into `words`; level 0 sends nothing."""
    # Higher levels take more words: one more code takes more bits than shorter gaps save.
    return _platform.dependent(
        candidates,
        order,
        cpu=functools.partial(_by_growth, words=words),
        default=functools.partial(_by_digits, words=words),
    )


class Columns(NamedTuple):
    """Candidates in m columns of COLUMN, as a matrix or as a tuple of its rows int32[m].

    A pass over the columns keeps its state in registers. Then only m values need a running maximum,
    which takes a dozen passes on an accelerator.
    """

    positions: jax.Array | Arrays  # int32[COLUMN, m]
    magnitude: jax.Array | Arrays  # float32[COLUMN, m], zero after the candidates
    start: jax.Array  # index of the first candidate in each column, int32[m]
    part: jax.Array  # number of candidates per cut, int32[]

    @classmethod
    def of(cls, candidates: Candidates, separate: bool = False) -> "Columns":
        """Cut the candidates into columns; if `separate`, each row is an array of its own."""
        k = candidates.positions.size
        # Pad once here: a bound check inside the passes would prevent their vectorization.
        missing = -k % (COLUMN * BLOCK if k > COLUMN * BLOCK else COLUMN)

        def cut(x: jax.Array) -> jax.Array | Arrays:
            columns = _shapes.rows(jnp.pad(x, (0, missing)), COLUMN)
            if not separate:
                return columns.T
            return lax.optimization_barrier(tuple(columns[:, i] for i in range(COLUMN)))

        positions, magnitude = cut(candidates.positions), cut(candidates.magnitude)
        start = COLUMN * lax.iota(jnp.int32, (k + missing) // COLUMN)
        return cls(positions, magnitude, start, jnp.int32(-(-k // CUTS)))

    def sample(self) -> "Columns":
        """Keep one of `SAMPLED` blocks; only the gap before each kept block changes."""

        def few(x: jax.Array) -> jax.Array:
            blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
            return blocks[..., ::SAMPLED, :].reshape(*x.shape[:-1], -1)

        return jax.tree.map(lambda x: few(x) if x.ndim else x, self)

    def words(self, order: jax.Array, level: jax.Array) -> jax.Array:
        """Return the number of words for the codes of a level."""
        cut, units = _at_level(level, self.part)
        zero = _axes.vary_like(jnp.zeros_like(self.start), self.magnitude[0])
        columns = jnp.full_like(zero, MISSING), jnp.full_like(zero, -1), zero
        for i, row in enumerate(zip(self.positions, self.magnitude, strict=True)):
            columns = _follow(columns, row, self.start < cut - i, units, order, zero)
        # Without the barrier, XLA computes the columns again for each of these arrays.
        first, last, inner = lax.optimization_barrier(columns)
        before = jnp.pad(_count.cummax(last + 1), (1, 0))[:-1]
        outer = jnp.where(first < MISSING, _exp_golomb.exponents(first - before, order), 0)
        inner = jnp.sum(_shapes.rows(inner, SUMMED), axis=1, dtype=jnp.int32)
        sums = inner >> SUM_BITS, inner & (1 << SUM_BITS) - 1, outer
        count, inner, outer = (jnp.sum(x, dtype=jnp.int32) for x in sums)
        return _exp_golomb.words_for(2 * count, inner + outer, (order + 1) * count)


@jax.jit  # traced once for all rows
def _follow(
    columns: Arrays, row: Arrays, ahead: jax.Array, units: Arrays, order: jax.Array, zero: jax.Array
) -> Arrays:
    """Add a row to each column's first and last kept position, and to its packed sums."""
    (first, last, inner), (at, magnitude) = columns, row
    reaches, kept = _reach(magnitude, ahead, units)
    fresh = last < 0
    gap = lax.select(fresh, zero, _exp_golomb.exponents(at - last - 1, order))
    one = 1 << SUM_BITS  # a kept candidate, counted above the sum of the exponents
    exponent = lax.bitcast_convert_type(reaches, jnp.int32) >> 23
    more = gap + jnp.maximum(exponent + (one - 127), one)
    first = lax.select(kept & fresh, at, first)
    return first, lax.select(kept, at, last), inner + lax.select(kept, more, zero)


def _at_level(level: jax.Array, part: jax.Array | int) -> tuple[jax.Array, Arrays]:
    """Return the number of candidates ahead of the cut, and the two resolutions of a level."""
    fineness, cuts = level >> CUT_BITS, level & CUTS - 1
    return part * cuts, (resolution(fineness), resolution(fineness + 1))


def _reach(magnitude: jax.Array, ahead: jax.Array, units: Arrays) -> tuple[jax.Array, jax.Array]:
    """Return magnitudes in units of T, and True for the magnitudes that are kept."""
    reaches = magnitude * units[0]
    # Only candidates ahead of the cut use the next finer T, so that a level can split equal values.
    return reaches, lax.select(ahead, magnitude * units[1], reaches) >= 1.0


def _by_digits(candidates: Candidates, order: jax.Array, words: int) -> jax.Array:
    """Find the finest level that fits, three bits at a time, in a loop of known length."""
    # If the rows were those of a matrix, XLA for GPUs would copy each row in each pass.
    table = Columns.of(candidates, separate=True)
    words_of = jax.vmap(functools.partial(table.words, order))

    def settle(i: jax.Array, level: jax.Array) -> jax.Array:
        shift = LEVEL_BITS - DIGIT_BITS * (i + 1)
        higher = level + (jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32) << shift)
        return level + (jnp.sum(words_of(higher) <= words, dtype=jnp.int32) << shift)

    zero = _axes.vary_like(jnp.int32(0), candidates.magnitude)
    return lax.fori_loop(0, LEVEL_BITS // DIGIT_BITS, settle, zero)


class _Bracket(NamedTuple):
    """Levels, int32[]: the codes of `low` fit, and the codes of `high` do not."""

    low: jax.Array
    high: jax.Array
    next: jax.Array  # level to try next
    turn: jax.Array
    tried: jax.Array  # level tried last
    excess: jax.Array  # log2(words of the level tried last / words that fit), float32[]
    slope: jax.Array  # growth of log2(words) per level, float32[]


def _by_growth(candidates: Candidates, order: jax.Array, words: int) -> jax.Array:
    """Find the finest level that fits, by secants, which start at the level found for a sample."""
    table, slope = Columns.of(candidates), jnp.float32(GROWTH / (PER_OCTAVE * CUTS))
    # Start at the level that sends all candidates, whose codes take about half of the words.
    least = jnp.maximum(jnp.min(candidates.magnitude), 2.0**-OCTAVES)
    first = jnp.round(-jnp.log2(least) * (PER_OCTAVE * CUTS)).astype(jnp.int32)
    if words // SAMPLED >= FEW:
        few = table.sample()
        share = words * few.start.size // table.start.size
        found = _by_secants(few, order, share, first, slope)
        first, slope = found.low, found.slope
    return _by_secants(table, order, words, first, slope).low


def _by_secants(
    table: Columns, order: jax.Array, words: int, first: jax.Array, slope: jax.Array
) -> _Bracket:
    """Narrow the bracket to neighboring levels: `low` fits, and `low` + 1 does not."""
    usual = GROWTH / (PER_OCTAVE * CUTS)

    def narrow(b: _Bracket) -> _Bracket:
        found = table.words(order, b.next)
        fits = found <= words
        low, high = jnp.where(fits, b.next, b.low), jnp.where(fits, b.high, b.next)
        excess = jnp.log2(jnp.maximum(found, 1).astype(jnp.float32) / words)
        away = (b.next - b.tried).astype(jnp.float32)
        slope = jnp.clip((excess - b.excess) / away, usual / 3, usual * 10)
        # Between levels that are close, the cuts distort the slope, so keep the last one.
        slope = jnp.where((b.turn == 0) | (jnp.abs(away) < 4), b.slope, slope)
        # Round away from the tried level, so that the bracket closes from both sides.
        away = -excess / slope
        away = jnp.where(fits, jnp.ceil(away), jnp.floor(away)).astype(jnp.int32)
        # Secants may move one end only: bisect in each fifth turn, or tenth with an unknown end.
        period = jnp.where((low > 0) & (high < LEVELS), 5, 10)
        following = jnp.where((b.turn + 1) % period == 0, (low + high) // 2, b.next + away)
        following = jnp.clip(following, low + 1, high - 1)
        return _Bracket(low, high, following, b.turn + 1, b.next, excess, slope)

    zero = _axes.vary_like(jnp.int32(0), table.magnitude[0])
    start = jnp.clip(first, 1, LEVELS - 1)
    slope = _axes.vary_like(slope, table.magnitude[0])
    unknown = zero.astype(jnp.float32)
    bracket = _Bracket(zero, zero + LEVELS, start, zero, zero, unknown, slope)
    return lax.while_loop(lambda b: b.high - b.low > 1, narrow, bracket)


HEAD = 8
"""Bytes before the codes: 4 for T, and 4 for the number of coefficients and the order."""

LEAST_BITS = 6
"""At most one coefficient per LEAST_BITS bits is sent."""

MOST = 1 << 26
"""Largest number of coefficients, so that an int32 can count their bits."""


class BudgetSide(NamedTuple):
    """Side: number of coefficients and order of the gap codes in uint32[1], then all codes."""

    head: jax.Array
    words: jax.Array


def _decoded(step: jax.Array, q: jax.Array, negative: jax.Array) -> jax.Array:
    """Return the decoded values for q, with the quantization step T as `step`, float32[k]."""
    q = q.astype(jnp.float32)
    # The largest value may exceed the float32 range. If the step is NaN, all values are NaN.
    bound = jnp.where(jnp.isfinite(step), jnp.finfo(jnp.float32).max, jnp.inf)
    size = jnp.minimum(step * (q + q / (2 * q + 1)), bound)
    return jnp.where(negative, -size, size)


@value
class Budget(Selector):
    """Selector: as many of the largest coefficients as fit into a given size, quantized.

    With a quantization step T, x_i is sent as q_i = floor(|x_i| / T), if q_i > 0. The payload holds
    q_i, the sign, and the gap, which is the number of unsent coefficients since the last sent one.
    All are in exponential-Golomb codes. A gap takes 1 + r + 2 floor(log2((gap >> r) + 1)) bits,
    where the order r is fitted, and q with its sign takes 2 + 2 floor(log2 q). So clustered
    positions take few bits. There are 32 candidates for T per octave, down to about 2^-16 of the
    largest coefficient. T is the smallest candidate whose codes fit. Bits then remain. They are
    used for coefficients just below T, which the next smaller candidate would send: the first of
    them, by position, are sent with q = 1.

    q decodes to 2q(q + 1) / (2q + 1) · T, which has the smallest maximum relative error over
    [qT, (q + 1)T]. `Budget` also quantizes, so it must be the last stage of a chain. Real and
    imaginary parts are separate coefficients.

    Args:
      ratio: bytes of the vector in float32 (complex64), divided by the bytes of the payload.
        `Budget(ratio=100)` sends a bfloat16 gradient in 50 times fewer bytes.

    Wire: x float32[n] | complex64[n] -> main float32[1], T; side uint32 words. Main and side take
      4 floor(n / ratio) bytes together (complex: 4 floor(2n / ratio)), at least 20.
      At most one coefficient per 6 bits is sent: the largest by exponent and 8 mantissa bits.

    Claims: biased; not summable. Up to float32 rounding, the relative error of a sent coefficient
      is at most 3/8 below T, 1/3 from T to 2^15 T, and 2^-15 above. All platforms send the
      same bits. Values below 2^-125 count as zero.

    Differs from the paper: QSGD rounds to levels stochastically, in units of the norm, and uses
      recursive Elias codes.

    Example:
      >>> x, codec = 1.0 / (1.0 + jnp.arange(1000.0)), fg.Budget(ratio=50)
      >>> back = fg.decompress(codec, fg.compress(codec, x), like=x)
      >>> int(jnp.sum(back != 0)), bool(jnp.linalg.norm(back - x) < 0.1 * jnp.linalg.norm(x))
      (96, True)

    References:
      Alistarh et al., NeurIPS 2017, arXiv:1610.02132, for levels and gaps in Elias codes. Teuhola,
      "A Compression Method for Clustered Bit-Vectors", Information Processing Letters 7(6), 1978.
    """

    ratio: int | float

    def __post_init__(self) -> None:
        _top_k.check_static("Budget(ratio)", self.ratio, float | int)
        check_within("Budget(ratio)", self.ratio, "[1, inf)", "use ratio=100.")

    @property
    def last(self) -> bool:
        return True

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        words = self._words(x)
        candidates = Candidates.of(_quantizers.as_real(x), self._most(x))
        order = order_of(candidates)
        level = finest(candidates, order, words)
        kept, q = candidates.at(level)
        # If a value is not finite, only the first coefficient is sent, as NaN.
        finite = jnp.isfinite(candidates.scale)
        kept = jnp.where(finite, kept, lax.iota(jnp.int32, kept.size) == 0)
        gaps = jnp.where(finite, gaps_of(candidates.positions, kept), 0)
        q = jnp.where(finite, q, 1)
        rows = (gaps, 2 * (q - 1) + candidates.negative)
        codes = _exp_golomb.encode(rows, (order, SIGN), kept, words)
        count = jnp.sum(kept, dtype=jnp.int32)
        head = (count | order << 27).astype(jnp.uint32)[None]
        unit = candidates.scale / resolution(level >> CUT_BITS)
        main = _wire.without_gradient(unit[None], x)  # float, but without a derivative
        payload = Payload(main, BudgetSide(head, codes))
        if jnp.iscomplexobj(x):
            return Compressed(payload)
        # A NaN is sent at position 0.
        at = candidates.positions.at[0].multiply(finite.astype(jnp.int32))
        sent = _decoded(main[0], q, candidates.negative == 1)
        return Compressed(payload, sparse=Sparse(at, jnp.where(kept, sent, 0.0)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        few = self._decoded(payload, like)
        whole = few.put_into(jnp.zeros((_quantizers.real_size(like),), jnp.float32))
        return _quantizers.from_real(whole, like)

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse | None:
        if jnp.issubdtype(like.dtype, jnp.complexfloating):
            return None
        return self._decoded(payload, like)

    def positions(self, side: BudgetSide, n: int, step: Step) -> jax.Array:
        like = jax.ShapeDtypeStruct((n,), jnp.float32)
        return self._decoded(Payload(jnp.ones((1,)), side), like).positions

    def _decoded(self, payload: Payload, like: Like) -> Sparse:
        n, most = _quantizers.real_size(like), self._most(like)
        head = payload.side.head[0].astype(jnp.int32)
        count, order = head & (1 << 27) - 1, head >> 27
        gaps, levels = _exp_golomb.decode(payload.side.words, (order, SIGN), most)
        slot = lax.iota(jnp.int32, most)
        used = slot < count
        at = _count.cumsum(jnp.where(used, gaps + 1, 0)) - 1
        value = _decoded(payload.main[0], (levels >> 1) + 1, levels & 1 == 1)
        return Sparse(jnp.where(used, at, n + slot), jnp.where(used, value, 0.0))

    def _words(self, like: Like) -> int:
        """Return the number of words for codes."""
        size = int(4 * _quantizers.real_size(like) / self.ratio)
        return max(size - HEAD, 12) // 4

    def _most(self, like: Like) -> int:
        return min(_quantizers.real_size(like), max(1, 32 * self._words(like) // LEAST_BITS), MOST)
