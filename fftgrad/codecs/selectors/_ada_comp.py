"""AdaComp's selection: what the last gradient carries over its bin's maximum."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, Selector, Sparse, Step
from fftgrad._values import check_count, check_within, value
from fftgrad.codecs.selectors import _limited
from fftgrad.ops import _finite, _rows
from fftgrad.ops.packing import _bitmap


class AdaCompState(NamedTuple):
    """State: what was left behind by the step before, to tell the newest gradient from the rest."""

    residue: jax.Array


class AdaCompSide(NamedTuple):
    """Side: the one magnitude of all values, float32[1], and where they belong."""

    scale: jax.Array
    support: _limited.Support


@value
class AdaComp(Selector):
    """Selector: in each bin, what would exceed the bin's maximum if the gradient came again.

    With x the residue plus the gradient g, and g_b the largest |x_i| of bin b, the sign of x_i is
    sent if |x_i + g_i| >= g_b. All values have one magnitude, the mean of g_b. How many travel
    depends on the data, up to the capacity of the message. It finds g by remembering what the last
    step left behind, so it belongs behind `ErrorFeedback()`.

    Args:
      bin_size: values per bin; the paper uses 50 for convolutions, 500 for other layers.
      per_bin: how many values a bin has room for on average; what is more stays behind, the
        highest positions first, and is counted in `overflow`.

    Wire: x float32[n] -> main uint32[ceil(c/32)], signs, c = min(n, ceil(per_bin · n / bin_size));
      side c (2 + log2(n/c)) bits of positions, and 8 bytes.

    Claims: biased; not summable.

    Differs from the paper: positions in Elias-Fano code, about half of its 8 or 16 bits an entry;
      a fixed capacity; a bin of zeros sends nothing.

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
        rows = _rows.rows(jnp.abs(x), size)
        most = jnp.max(rows, axis=1)
        again = jnp.abs(x + (x - state.residue))
        mask = (again >= jnp.repeat(most, size)[: x.size]) & (x != 0) | ~jnp.isfinite(x)
        (words,) = _bitmap.pack(mask)
        taken = _limited.take(x, words, self._capacity(x.size))
        scale = (_finite.mean(most, most.size) + _finite.poison(x))[None]
        (signs,) = _bitmap.pack(taken.payload.main < 0)
        payload = Payload(signs, AdaCompSide(scale, taken.payload.side))
        residue = x - self.decompress(payload, x, step)
        return Compressed(payload, taken.overflow, AdaCompState(residue))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        return self.sparse(payload, like, step).put_into(jnp.zeros(like.shape, jnp.float32))

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse:
        (n,) = like.shape
        signs = jnp.where(_bitmap.unpack(payload.main, self._capacity(n)), -1.0, 1.0)
        return Sparse(self.positions(payload.side, n, step), signs * payload.side.scale)

    def positions(self, side: AdaCompSide, n: int, step: Step) -> jax.Array:
        return _limited.positions(side.support, self._capacity(n), n)

    def _capacity(self, n: int) -> int:
        return min(n, max(1, math.ceil(round(self.per_bin * n / self.bin_size, 6))))
