"""Selectors that keep a data-dependent number of values, up to the capacity of the payload."""

import functools
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import Compressed, Like, Payload, PyTree, Selector, Sparse, Step
from fftgrad._values import check_choice, check_count, check_within, value
from fftgrad.codecs import _top_k
from fftgrad.ops import _codes, _count, _finite, _platform, _positions, _selection, _shapes


class Support(NamedTuple):
    """Number of values, uint32[1], and the positions of all slots; unused slots are beyond n."""

    length: jax.Array
    positions: _positions.EliasFano | _positions.Bitmap


def take_first(x: jax.Array, words: jax.Array, capacity: int) -> Compressed:
    """Keep the first `capacity` selected values, as NaN if `x` is not finite; count the others."""
    n = x.size
    selected = _positions.count(words)
    length = jnp.minimum(selected, capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    used = slot < length
    positions = jnp.where(used, _positions.select(_positions.rank(words), capacity), n + slot)
    code = _positions.encode_positions(positions, capacity, n + capacity)
    main = jnp.where(used, x[jnp.minimum(positions, n - 1)], 0) + _finite.poison(x)
    side = Support(length.astype(jnp.uint32)[None], code)
    return Compressed(Payload(main, side), selected - length)


def slots(support: Support, capacity: int, n: int) -> jax.Array:
    """Return the position of each slot, int32[capacity]; n or more if the slot is unused."""
    found = _positions.decode(support.positions, capacity, n + capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where(slot.astype(jnp.uint32) < support.length, found, n + slot)


Search = Literal["binary", "exact"]

HALVINGS, AHEAD = 20, 4
BY_VALUE = 8
"""The first 8 of 20 halvings bisect the value. The others bisect its bits, like a logarithm."""


class ThresholdState(NamedTuple):
    """State of `Threshold`: the threshold, and the number of steps that have used it."""

    threshold: jax.Array
    age: jax.Array


@value
class Threshold(Selector):
    """Selector: keep values with a magnitude above a threshold, up to a fixed capacity.

    The "binary" search bisects the threshold between the mean of all |x_i| and their maximum, until
    k to 2k magnitudes exceed the threshold. If fewer than k magnitudes exceed the mean, the search
    starts from 0 instead. The "exact" search keeps the k largest non-zero values. If more values
    exceed the threshold than the payload holds, the values at the highest positions are dropped,
    and counted in `overflow`.

    Args:
      fraction: share of the n values to keep; k = ceil(fraction · n).
      search: "binary" or "exact".
      reuse: number of steps that use one threshold, only for "binary". If more
        values exceed it than the payload holds, the next step searches anew.

    Wire: x float32[n] | complex64[n] -> main of that dtype [c], c = min(n, 2k), or k if exact;
      side: positions, about c (2 + log2(n/c))/8 bytes, and their number, 4 bytes.

    Claims: biased; not summable; kept values are exact.

    Differs from the paper: the published code stops when the interval is 0.2 of its first length.
      This codec halves the interval up to 8 times, and then that of the logarithms up to 12 times.

    Example:
      >>> x = jnp.array([1.0, -9.0, 2.0, 8.0, 0.5, 0.1, 0.0, 0.2])
      >>> fg.decompress(fg.Threshold(fraction=0.25), fg.compress(fg.Threshold(fraction=0.25), x), x)
      Array([ 0., -9.,  0.,  8.,  0.,  0.,  0.,  0.], dtype=float32)

    References:
      Fang et al., JPDC 133, 2019, arXiv:1808.04357 (RedSync).
    """

    fraction: float
    search: Search = "binary"
    reuse: int = 1

    def __post_init__(self) -> None:
        _top_k.check_size("Threshold", self.fraction, None)
        check_choice("Threshold(search)", self.search, get_args(Search))
        most = None if self.search == "binary" else 1
        check_count("Threshold(reuse)", self.reuse, 'use reuse=1, or search="binary".', most=most)

    def init(self, like: Like) -> ThresholdState:
        return ThresholdState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def compress(self, x: jax.Array, state: ThresholdState, step: Step) -> Compressed:
        k = _top_k.kept(self.fraction, None, x.size)
        if self.search == "exact":
            words, after = _codes.pack_masks(x != 0)[0], state
            if k < x.size:
                words &= _selection.largest(*_selection.keys(x), k).words
        else:
            words, after = self._search(jnp.abs(x), k, state)
        return take_first(x, words, self._capacity(x.size))._replace(state=after)

    def positions(self, side: Support, n: int, step: Step) -> jax.Array:
        return slots(side, self._capacity(n), n)

    def _search(
        self, magnitude: jax.Array, k: int, state: ThresholdState
    ) -> tuple[jax.Array, ThresholdState]:
        threshold, age = _bisect(magnitude, k), state.age
        # Keep NaN out of the state. If the threshold is NaN, all kept values are NaN anyway.
        threshold = jnp.where(jnp.isfinite(threshold), threshold, jnp.inf)
        if self.reuse > 1:
            # Without this check, values at the highest positions could be dropped in every step.
            fits = _above(magnitude, state.threshold) <= self._capacity(magnitude.size)
            serves = (age > 0) & (age < self.reuse) & fits
            threshold = jnp.where(serves, state.threshold, threshold)
            age = jnp.where(serves, age, 0)
        (words,) = _codes.pack_masks((magnitude > threshold) | ~jnp.isfinite(magnitude))
        return words, ThresholdState(threshold, age + 1)

    def _capacity(self, n: int) -> int:
        k = _top_k.kept(self.fraction, None, n)
        return k if self.search == "exact" else min(n, 2 * k)


class Bisection(NamedTuple):
    """Bounds of the threshold, True if at most 2k values exceed `low`, and the halvings done."""

    low: jax.Array
    high: jax.Array
    found: jax.Array
    halvings: jax.Array

    @property
    def unfinished(self) -> jax.Array:
        return ~self.found & (self.halvings < HALVINGS)

    def halve(self, middle: jax.Array, count: jax.Array, k: int) -> "Bisection":
        """Return the half to search next; `count` values are above `middle`."""
        enough = count >= k
        return Bisection(
            jnp.where(enough, middle, self.low),
            jnp.where(enough, self.high, middle),
            enough & (count <= 2 * k),
            self.halvings + 1,
        )


def _bisect(magnitude: jax.Array, k: int) -> jax.Array:
    """Find a threshold that k to 2k magnitudes exceed, or the nearest after all halvings."""
    mean, top = jnp.sum(magnitude * (1.0 / magnitude.size)), jnp.max(magnitude)
    low = jnp.where(_above(magnitude, mean) >= k, mean, 0.0)
    found = _above(magnitude, low) <= 2 * k
    # `lax.while_loop` requires a carry that varies over the same axes as the data.
    start = Bisection(low, top, found, _axes.vary_like(jnp.int32(0), top))
    return _platform.dependent(
        magnitude,
        start,
        cpu=functools.partial(_in_a_loop, k=k),
        default=functools.partial(_at_once, k=k),
    )


def _in_a_loop(magnitude: jax.Array, start: Bisection, k: int) -> jax.Array:
    def turn(b: Bisection) -> Bisection:
        by_value, by_bits = _mean(b.low, b.high), _half_way(b.low, b.high)
        middle = jnp.where(b.halvings < BY_VALUE, by_value, by_bits)
        return b.halve(middle, _above(magnitude, middle), k)

    return lax.while_loop(lambda b: b.unfinished, turn, start).low


def _at_once(magnitude: jax.Array, start: Bisection, k: int) -> jax.Array:
    """Count in one pass for all middles that the next AHEAD halvings can reach.

    In a loop of unknown length, a GPU would wait for the host in each turn.
    """
    rows, b = _shapes.rows(magnitude, _count.LONG_ROW), start
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
    """Return the float whose bits, as an integer, are the mean of the bits of two magnitudes."""
    first, last = (lax.bitcast_convert_type(end, jnp.int32) for end in (low, high))
    return lax.bitcast_convert_type(first + (last - first) // 2, jnp.float32)


def _tree(b: Bisection, halvings: int) -> jax.Array:
    """Return the next middle, then the middles of its lower and upper half, and so on."""
    low, high = b.low[None], b.high[None]
    levels: list[jax.Array] = []
    for ahead in range(AHEAD):
        middle = (_mean if halvings + ahead < BY_VALUE else _half_way)(low, high)
        levels.append(middle)
        low = jnp.stack([low, middle], axis=1).ravel()
        high = jnp.stack([middle, high], axis=1).ravel()
    return jnp.concatenate(levels)


def _above(magnitude: jax.Array, bound: jax.Array) -> jax.Array:
    return _positions.count(*_codes.pack_masks(magnitude > bound))


class AdaCompState(NamedTuple):
    """State of `AdaComp`: the residue after the last step; x - residue is the new gradient."""

    residue: jax.Array


class AdaCompSide(NamedTuple):
    """Side of `AdaComp`: the magnitude of all sent values, float32[1], and their positions."""

    scale: jax.Array
    support: Support


@value
class AdaComp(Selector):
    """Selector: keep values that a second such gradient would lift above their bin's maximum.

    Let x be the residual plus the gradient g, and g_b the largest |x_i| in bin b. The sign of x_i
    is sent if |x_i + g_i| >= g_b. All signs are decoded with one magnitude, the mean of all g_b.
    The codec finds g by subtracting its own copy of the residual, which is that of
    `ErrorFeedback()`; so use it with this memory.

    Args:
      bin_size: values per bin; the paper uses 50 for convolutions, 500 for other layers.
      per_bin: values sent per bin on average, at most; later values are counted in `overflow`.

    Wire: x float32[n] -> main uint32[ceil(c/32)], signs, c = min(n, ceil(per_bin · n / bin_size));
      side: positions, c (2 + log2(n/c)) bits, their number and the magnitude, 4 bytes each.

    Claims: biased; not summable.

    Differs from the paper: a position takes about half of the paper's 8 or 16 bits. The number of
      sent values is bounded. A bin of zeros sends nothing.

    Example:
      >>> codec = fg.codecs.AdaComp(bin_size=4)
      >>> x = jnp.array([0.1, 4.0, 0.0, 0.2, 0.1, 0.0, -2.0, 0.3])
      >>> fg.decompress(codec, fg.compress(codec, x), like=x)
      Array([ 0.,  3.,  0.,  0.,  0.,  0., -3.,  0.], dtype=float32)

    References:
      Chen et al., AAAI 2018, arXiv:1712.02679.
    """

    bin_size: int = 500
    per_bin: float = 4.0

    def __post_init__(self) -> None:
        check_count("AdaComp(bin_size)", self.bin_size, "use bin_size=500.")
        check_within("AdaComp(per_bin)", self.per_bin, f"(0, {self.bin_size}]", "use per_bin=4.")

    def init(self, like: Like) -> AdaCompState:
        return AdaCompState(jnp.zeros(like.shape, jnp.float32))

    @property
    def last(self) -> bool:
        return True

    def compress(self, x: jax.Array, state: AdaCompState, step: Step) -> Compressed:
        size = min(self.bin_size, x.size)
        rows = _shapes.rows(jnp.abs(x), size)
        most = jnp.max(rows, axis=1)
        again = jnp.abs(x + (x - state.residue))
        mask = (again >= jnp.repeat(most, size)[: x.size]) & (x != 0) | ~jnp.isfinite(x)
        (words,) = _codes.pack_masks(mask)
        taken = take_first(x, words, self._capacity(x.size))
        scale = (_finite.mean(most, most.size) + _finite.poison(x))[None]
        (signs,) = _codes.pack_masks(taken.payload.main < 0)
        payload = Payload(signs, AdaCompSide(scale, taken.payload.side))
        residue = x - self.decompress(payload, x, step)
        return Compressed(payload, taken.overflow, AdaCompState(residue))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return self.sparse(payload, like, step).put_into(jnp.zeros(like.shape, jnp.float32))

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        signs = jnp.where(_codes.unpack_mask(payload.main, self._capacity(n)), -1.0, 1.0)
        return Sparse(self.positions(payload.side, n, step), signs * payload.side.scale)

    def positions(self, side: AdaCompSide, n: int, step: Step) -> jax.Array:
        return slots(side.support, self._capacity(n), n)

    def _capacity(self, n: int) -> int:
        return min(n, max(1, math.ceil(round(self.per_bin * n / self.bin_size, 6))))


@value
class AlternatingSign(Selector):
    """Selector: keep positive values in even steps and negative values in odd steps.

    Dropped values become zeros. All kept values have the same sign, so a `Threshold` and
    `MeanMagnitude` can follow, which send only positions and one magnitude.

    Wire: x float32[n] -> main float32[n].

    Claims: biased; not summable: the dropped values depend on the step.

    Example:
      >>> fg.compress(fg.codecs.AlternatingSign(), jnp.array([1.0, -2.0, 3.0])).main
      Array([1., 0., 3.], dtype=float32)

    References:
      Fang et al., JPDC 133, 2019, arXiv:1808.04357.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        other = jnp.where(jnp.asarray(step.number) % 2 == 0, x < 0, x > 0)
        return Compressed(Payload(jnp.where(other & jnp.isfinite(x), 0.0, x)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return payload.main

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        return jnp.arange(n, dtype=jnp.int32)
