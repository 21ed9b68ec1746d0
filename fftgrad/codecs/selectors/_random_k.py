"""k coefficients that chance chooses, the same on all workers."""

import dataclasses

import jax
import jax.numpy as jnp

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Selector, Sparse, Step
from fftgrad._values import value
from fftgrad.codecs.selectors import _top_k
from fftgrad.ops import _finite, _hash


@value
class RandomK(Selector):
    """Selector: keep k coefficients at random positions, the same on all workers.

    The vector is cut into k intervals of about n/k values, and one position is drawn in each from
    `step.shared`. No position travels, and payloads may be summed.

    Args:
      fraction: share of the n coefficients kept, 0 < fraction <= 1; k = ceil(fraction · n).
      k: how many are kept, instead; all n where n < k.
      rescale: whether to multiply what is kept by n/k, the inverse of its chance, so that the
        result is right on average. With error feedback that would send the residual n/k times.

    Wire: x float32[n] | complex64[n] -> main of that dtype [k].

    Claims: summable; unbiased if it rescales. If anything is not finite, nothing in the result is.
      A kept value overflows where n/k times it is more than float32 holds.

    Differs from the paper: one position from each of k intervals, where it draws k of all n. Each
      coefficient has the same chance, and the positions come in order, without a shuffle.

    Example:
      >>> fg.compress(fg.RandomK(k=2), jnp.array([1.0, 1.0, 2.0, 2.0]), step=fg.Step.of(0)).main
      Array([1., 2.], dtype=float32)

    References:
      Stich, Cordonnier and Jaggi, NeurIPS 2018, arXiv:1809.07599.
    """

    fraction: float | None = None
    k: int | None = None
    rescale: bool = False

    def __post_init__(self) -> None:
        _top_k.check_size("RandomK", self.fraction, self.k)

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return self.rescale

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        positions, width = self._draw(x.size, step)
        # What is not drawn must not hide a NaN, which feedback would keep for ever.
        kept = x[positions] * (width.astype(x.dtype) if self.rescale else 1.0)
        return Compressed(Payload(kept + _finite.poison(x).astype(x.dtype)))

    def shard(self, parts: int) -> "RandomK":
        return dataclasses.replace(self, k=_top_k.shard_k(self.k, parts))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        kept = Sparse(self.positions((), n, step), payload.main)
        # Any of the values tells; and what each payload starts from is its own to scatter into.
        start = jnp.where(jnp.isfinite(payload.main[0]), 0.0, jnp.nan)
        whole = jnp.full((n,), start, payload.main.dtype)
        return kept.put_into(whole)

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        return self._draw(n, step)[0]

    def _draw(self, n: int, step: Step) -> tuple[jax.Array, jax.Array]:
        """The positions, and the width of their intervals: one over the chance of each."""
        k = _top_k.kept(self.fraction, self.k, n)
        width, longer = divmod(n, k)
        interval = jnp.arange(k, dtype=jnp.int32)
        start = interval * width + jnp.minimum(interval, longer)
        size = width + (interval < longer).astype(jnp.int32)
        remedy = " to compress, and the same to decompress"
        offset = _hash.drawn_bits(self, step.shared, k, remedy) % size.astype(jnp.uint32)
        return start + offset.astype(jnp.int32), size.astype(jnp.float32)
