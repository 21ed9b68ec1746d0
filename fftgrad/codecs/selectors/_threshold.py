"""Whatever is above a threshold, found by a short search."""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Compressed, Like, Selector, Step
from fftgrad._values import check_choice, check_count, check_within, value
from fftgrad.codecs.selectors import _largest, _limited, _top_k
from fftgrad.codecs.selectors._top_k import keys
from fftgrad.ops import _count, _platform, _rows
from fftgrad.ops.packing import _bitmap

Search = Literal["binary", "exact"]

HALVINGS, AHEAD = 20, 4
BY_VALUE = 8
"""After so many halvings of the value that of its bits follows, which finds any size."""


class ThresholdState(NamedTuple):
    """State: the threshold in use, and for how many steps it has been, 0 for none."""

    threshold: jax.Array
    age: jax.Array


@value
class Threshold(Selector):
    """Selector: keep what is larger than a threshold, in a message that carries its length.

    With μ the mean and M the maximum of |x_i|, the threshold is μ + r (M - μ). "binary" bisects r
    in [0, 1] until between k and 2k coefficients are larger (below μ, if fewer than k exceed it).
    "exact" takes the k largest that are not zero. What exceeds the capacity of the message stays
    behind, the highest positions first, and is counted in `overflow`.

    Args:
      fraction: share of the n coefficients aimed at; k = ceil(fraction · n).
      search: "binary" or "exact".
      capacity: size of the message in units of k, at least 1; "exact" needs no more than k.
      reuse: for how many steps a threshold serves before it is searched for again, or until more
        pass it than the message holds; only for "binary".

    Wire: x float32[n] | complex64[n] -> main of that dtype [c], c = min(n, ceil(capacity · k));
      side about c (2 + log2(n/c))/8 bytes of positions, 4 for the length.

    Claims: biased; not summable; every value kept is exact.

    Differs from the paper: the published code stops at a step of 0.2; here r is halved 8 times, and
      then the bits of the threshold, about its logarithm, 12 times: that comes to within 4 % of any
      size. Both searches end for any input, also where all values are equal.

    Example:
      >>> x = jnp.array([1.0, -9.0, 2.0, 8.0, 0.5, 0.1, 0.0, 0.2])
      >>> fg.decompress(fg.Threshold(fraction=0.25), fg.compress(fg.Threshold(fraction=0.25), x), x)
      Array([ 0., -9.,  0.,  8.,  0.,  0.,  0.,  0.], dtype=float32)

    References:
      Fang et al., JPDC 133, 2019, arXiv:1808.04357 (RedSync).
    """

    fraction: float
    search: Search = "binary"
    capacity: float = 2.0
    reuse: int = 1

    def __post_init__(self) -> None:
        _top_k.check_size("Threshold", self.fraction, None)
        check_choice("Threshold(search)", self.search, get_args(Search))
        check_within("Threshold(capacity)", self.capacity, "[1, inf]", "use capacity=2.0.")
        check_count("Threshold(reuse)", self.reuse, "use reuse=1.")
        if self.search == "exact" and self.reuse > 1:
            raise ValueError(
                f"Threshold(reuse): an exact search finds no threshold to use again, got "
                f"{self.reuse}; use reuse=1, or search='binary'."
            )

    def init(self, like: Like) -> ThresholdState:
        return ThresholdState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def compress(self, x: jax.Array, state: ThresholdState, step: Step) -> Compressed:
        k = _top_k.kept(self.fraction, None, x.size)
        if self.search == "exact":
            words, after = _largest_but_zero(x, k), state
        else:
            words, after = self._above(jnp.abs(x), k, state)
        return _limited.take(x, words, self._capacity(x.size))._replace(state=after)

    def positions(self, side: _limited.Support, n: int, step: Step) -> jax.Array:
        return _limited.positions(side, self._capacity(n), n)

    def _above(
        self, magnitude: jax.Array, k: int, state: ThresholdState
    ) -> tuple[jax.Array, ThresholdState]:
        threshold, age = _bisect(magnitude, k), state.age
        # An infinite mean is no bound, and a NaN makes it zero. What passes then does not matter:
        # the message is poisoned.
        threshold = jnp.where(jnp.isfinite(threshold), threshold, jnp.inf)
        if self.reuse > 1:
            # Or what does not fit would be, step by step, what has the highest positions.
            passing = _bitmap.count(*_bitmap.pack(magnitude > state.threshold))
            fits = passing <= self._capacity(magnitude.size)
            serves = (age > 0) & (age < self.reuse) & fits
            threshold = jnp.where(serves, state.threshold, threshold)
            age = jnp.where(serves, age, 0)
        (words,) = _bitmap.pack((magnitude > threshold) | ~jnp.isfinite(magnitude))
        return words, ThresholdState(threshold, age + 1)

    def _capacity(self, n: int) -> int:
        k = _top_k.kept(self.fraction, None, n)
        return k if self.search == "exact" else min(n, math.ceil(round(self.capacity * k, 6)))


def _largest_but_zero(x: jax.Array, k: int) -> jax.Array:
    """The bitmap of the k largest magnitudes, without zeros."""
    (words,) = _bitmap.pack(x != 0)
    return words if k == x.size else words & _largest.largest(*keys(x), k).words


class Bisection(NamedTuple):
    """Bounds of the threshold, whether the lower one will do, and how often they were halved."""

    low: jax.Array
    high: jax.Array
    found: jax.Array
    halvings: jax.Array

    @property
    def unfinished(self) -> jax.Array:
        return ~self.found & (self.halvings < HALVINGS)

    def halve(self, middle: jax.Array, count: jax.Array, k: int) -> "Bisection":
        """The half to go on with, where `count` values are above the middle."""
        enough = count >= k
        return Bisection(
            jnp.where(enough, middle, self.low),
            jnp.where(enough, self.high, middle),
            enough & (count <= 2 * k),
            self.halvings + 1,
        )


def _bisect(magnitude: jax.Array, k: int) -> jax.Array:
    """A bound that k to 2k magnitudes are above, as near as the halvings come to it."""
    mean, top, above = _statistics(magnitude)
    low = jnp.where(above(mean) >= k, mean, 0.0)
    found = above(low) <= 2 * k
    # Varying like the data, as a loop's carry has to be where that is tracked.
    start = Bisection(low, top, found, _axes.vary_like(jnp.int32(0), top))
    return _platform.dependent(
        magnitude,
        start,
        cpu=functools.partial(_in_a_loop, k=k),
        default=functools.partial(_at_once, k=k),
    )


def _in_a_loop(magnitude: jax.Array, start: Bisection, k: int) -> jax.Array:
    above = _statistics(magnitude)[2]

    def turn(b: Bisection) -> Bisection:
        by_value, by_bits = _mean(b.low, b.high), _half_way(b.low, b.high)
        middle = jnp.where(b.halvings < BY_VALUE, by_value, by_bits)
        return b.halve(middle, above(middle), k)

    return lax.while_loop(lambda b: b.unfinished, turn, start).low


def _at_once(magnitude: jax.Array, start: Bisection, k: int) -> jax.Array:
    """It, some halvings ahead in each pass, because a loop of unknown length makes the host wait.

    One pass counts for all the middles that the next halvings may meet, a binary tree of them.
    """
    rows, b = _rows.rows(magnitude, _count.LONG_ROW), start
    for done in range(0, HALVINGS, AHEAD):
        middles = lax.optimization_barrier(_tree(b, done))
        above = jnp.stack(_count.counts([rows > middles[i] for i in range(middles.size)]))
        node = jnp.int32(0)
        for _ in range(AHEAD):
            count = above[node]
            halved, going_on = b.halve(middles[node], count, k), b.unfinished
            b = Bisection(*(jnp.where(going_on, x, y) for x, y in zip(halved, b, strict=True)))
            node = 2 * node + 1 + (count >= k).astype(jnp.int32)
    return b.low


def _mean(low: jax.Array, high: jax.Array) -> jax.Array:
    return 0.5 * low + 0.5 * high


def _half_way(low: jax.Array, high: jax.Array) -> jax.Array:
    """The magnitude whose bits are half-way between those of two."""
    first, last = (lax.bitcast_convert_type(end, jnp.int32) for end in (low, high))
    return lax.bitcast_convert_type(first + (last - first) // 2, jnp.float32)


def _tree(b: Bisection, halvings: int) -> jax.Array:
    """The next middle, then those of its lower and its upper half, and so on."""
    low, high = b.low[None], b.high[None]
    levels: list[jax.Array] = []
    for ahead in range(AHEAD):
        middle = (_mean if halvings + ahead < BY_VALUE else _half_way)(low, high)
        levels.append(middle)
        low = jnp.stack([low, middle], axis=1).ravel()
        high = jnp.stack([middle, high], axis=1).ravel()
    return jnp.concatenate(levels)


def _statistics(
    magnitude: jax.Array,
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Mean, maximum, and how many are larger than a bound."""
    mean = jnp.sum(magnitude * (1.0 / magnitude.size))
    return mean, jnp.max(magnitude), lambda bound: _bitmap.count(*_bitmap.pack(magnitude > bound))
