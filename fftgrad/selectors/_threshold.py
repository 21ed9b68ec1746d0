"""Whatever is above a threshold, found by a short search."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._base import Like, Payload, Rng, constructor_call
from fftgrad.packing import _bitmap
from fftgrad.selectors import _limited, _size
from fftgrad.selectors._top_k import IN_ORDER

Search = Literal["binary", "trimmed"]

HALVINGS = 20
STRIDE = 0.2


class ThresholdState(NamedTuple):
    """State: the threshold in use, and for how many steps it has been."""

    threshold: jax.Array
    age: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Threshold:
    """Selector: keep what is larger than a threshold that k to 2k coefficients pass.

    With μ the mean and M the maximum of |x_i|, the threshold is μ + r (M - μ). "binary" bisects r
    in [0, 1] until between k and 2k coefficients are larger (below μ, if fewer than k exceed it);
    "trimmed" lowers r from 0.8 by 0.2 until k are, and from μ on the threshold by fifths of μ. No
    coefficient is ordered. The message has a fixed capacity and carries its true length; what does
    not fit stays behind, the highest positions first, and is counted in `overflow`.

    Args:
      fraction: share of the n coefficients aimed at; k = ceil(fraction · n).
      search: "binary" or "trimmed".
      capacity: size of the message in units of k, at least 1.
      reuse: for how many steps a threshold serves before it is searched for again.

    Shapes: x float32[n] | complex64[n] -> main of that dtype [c], c = min(n, ceil(capacity · k)),
      side uint32 words.

    Wire: 4c bytes (8c if complex), about c (2 + log2(n/c))/8 for positions, 4 for the length.

    Claims: biased; not summable; every value kept is exact.

    Differs from the paper: the bisection goes on to a step of 2^-20 where the published code stops
      at 0.2, so that the count ends between k and 2k wherever some threshold has such a count.
      Both searches end for any input, also for one whose values are all equal.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> x = jnp.array([1.0, -9.0, 2.0, 8.0, 0.5, 0.1, 0.0, 0.2])
      >>> fg.decompress(fg.Threshold(fraction=0.25), fg.compress(fg.Threshold(fraction=0.25), x), x)
      Array([ 0., -9.,  0.,  8.,  0.,  0.,  0.,  0.], dtype=float32)

    References:
      Fang et al., "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning
      Training System", JPDC 133, 2019, arXiv:1808.04357.
    """

    fraction: float
    search: Search = "binary"
    capacity: float = 2.0
    reuse: int = 1

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        _size.check("Threshold", self.fraction, None)
        if self.search not in get_args(Search):
            raise ValueError(
                f"Threshold(search): must be one of {get_args(Search)}, got {self.search!r}; use "
                "'binary'."
            )
        if self.capacity < 1 or self.reuse < 1:
            raise ValueError(
                f"Threshold(capacity, reuse): must be at least 1, got {self.capacity} and "
                f"{self.reuse}; use capacity=2.0, reuse=1."
            )

    @property
    def summable(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    def init(self, like: Like) -> ThresholdState:
        return ThresholdState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def adapt(
        self, x: jax.Array, state: ThresholdState, rng: Rng | None
    ) -> tuple[Payload, ThresholdState]:
        magnitude = jnp.abs(x)
        search = _bisect if self.search == "binary" else _trim
        k = _size.count(self.fraction, None, x.size)
        threshold = search(magnitude, k)
        # Where something is not finite, that alone passes.
        threshold = jnp.where(jnp.isfinite(threshold), threshold, jnp.inf)
        if self.reuse > 1:
            threshold = jnp.where(state.age % self.reuse == 0, threshold, state.threshold)
        mask = (magnitude > threshold) | ~jnp.isfinite(magnitude)
        payload = _limited.take(x, mask, self._capacity(x.size))
        return payload, ThresholdState(threshold, state.age + 1)

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        return self.adapt(x, self.init(x), rng)[0]

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        return self.accumulate(jnp.zeros(like.shape, payload.main.dtype), payload)

    def accumulate(self, total: jax.Array, payload: Payload) -> jax.Array:
        positions = _limited.positions(payload.side, payload.main.size, total.size)
        return total.at[positions].add(payload.main, **IN_ORDER)

    def _capacity(self, n: int) -> int:
        k = _size.count(self.fraction, None, n)
        return min(n, math.ceil(round(self.capacity * k, 6)))


def _bisect(magnitude: jax.Array, k: int) -> jax.Array:
    mean, top, above = _statistics(magnitude)
    low, high = jnp.where(above(mean) >= k, mean, 0.0), top

    class Bisection(NamedTuple):
        low: jax.Array
        high: jax.Array
        found: jax.Array
        halvings: jax.Array

    def unfinished(b: Bisection) -> jax.Array:
        return ~b.found & (b.halvings < HALVINGS)

    def halve(b: Bisection) -> Bisection:
        middle = 0.5 * b.low + 0.5 * b.high
        count = above(middle)
        enough = count >= k
        return Bisection(
            jnp.where(enough, middle, b.low),
            jnp.where(enough, b.high, middle),
            enough & (count <= 2 * k),
            b.halvings + 1,
        )

    found = above(low) <= 2 * k
    # Varying like the data, as a loop's carry has to be where that is tracked.
    start = Bisection(low, high, found, _axes.vary_like(jnp.int32(0), top))
    return lax.while_loop(unfinished, halve, start).low


def _trim(magnitude: jax.Array, k: int) -> jax.Array:
    mean, top, above = _statistics(magnitude)

    def lowered(strides: jax.Array) -> jax.Array:
        ratio = 1 - STRIDE * strides.astype(jnp.float32)
        # Where all are about equal, steps in proportion to (top - mean) would not reach zero.
        unit = jnp.where(ratio >= 0, top - mean, mean)
        return jnp.maximum(mean + ratio * unit, 0.0)

    def too_few(strides: jax.Array) -> jax.Array:
        return (above(lowered(strides)) < k) & (lowered(strides) > 0)

    first = _axes.vary_like(jnp.int32(1), top)
    return lowered(lax.while_loop(too_few, lambda strides: strides + 1, first))


def _statistics(
    magnitude: jax.Array,
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Mean, maximum, and how many are larger than a bound."""
    mean = jnp.sum(magnitude * (1.0 / magnitude.size))
    return mean, jnp.max(magnitude), lambda bound: _bitmap.count(*_bitmap.pack(magnitude > bound))
