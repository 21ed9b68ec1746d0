"""k coefficients that chance chooses, the same on all workers."""

import dataclasses

import jax
import jax.numpy as jnp

from fftgrad import _hash, _parts
from fftgrad._base import Like, Payload, Rng, constructor_call
from fftgrad.selectors import _size
from fftgrad.selectors._top_k import IN_ORDER


@dataclasses.dataclass(frozen=True, repr=False)
class RandomK:
    """Selector: keep k coefficients at random positions, the same on all workers.

    The vector is cut into k intervals of n/k values, one more or less, and one position is drawn
    in each from `rng.shared`. No position is drawn twice, none travels, and payloads may be summed.

    Args:
      fraction: share of the n coefficients kept, 0 < fraction <= 1; k = ceil(fraction · n).
      k: how many are kept, instead; all n where n < k.
      rescale: whether to multiply what is kept by n/k, the inverse of its chance, so that the
        result is right on average. With error feedback that would send the residual n/k times.

    Shapes: x float32[n] | complex64[n] -> main of that dtype [k], side ().

    Wire: 4k bytes, 8k if complex.

    Claims: summable; unbiased if it rescales. If anything is not finite, nothing in the result is.

    Differs from the paper: one position from each of k intervals, where it draws k of all n. Each
      coefficient has the same chance, and the positions come in order, without a shuffle.

    Raises:
      ValueError: unless exactly one of `fraction` and `k` is given and in range; if `rng` is None.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> fg.compress(fg.RandomK(k=2), jnp.array([1.0, 1.0, 2.0, 2.0]), rng=fg.Rng.of(0)).main
      Array([1., 2.], dtype=float32)

    References:
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599.
    """

    fraction: float | None = None
    k: int | None = None
    rescale: bool = False

    __repr__ = constructor_call

    def __post_init__(self) -> None:
        _size.check("RandomK", self.fraction, self.k)

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return self.rescale

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        positions, width = self._draw(x.size, rng)
        # What is not drawn must not hide a NaN, which feedback would keep for ever.
        poison = jnp.where(_parts.all_finite(x), 0.0, jnp.nan)
        return Payload(x[positions] * (width if self.rescale else 1.0) + poison)

    def shard(self, parts: int) -> "RandomK":
        return dataclasses.replace(self, k=_size.shard(self.k, parts))

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        (n,) = like.shape
        positions, _ = self._draw(n, rng)
        # Any of the values tells; and what each payload starts from is its own to scatter into.
        start = jnp.where(jnp.isfinite(payload.main[0]), 0.0, jnp.nan)
        whole = jnp.full((n,), start, payload.main.dtype)
        return whole.at[positions].set(payload.main, **IN_ORDER)

    def _draw(self, n: int, rng: Rng | None) -> tuple[jax.Array, jax.Array]:
        """The positions, and the width of their intervals: one over the chance of each."""
        if rng is None:
            raise ValueError(
                f"{self!r}(rng): the positions are drawn, got None; pass rng=fg.Rng.of(key) to "
                "compress, and the same to decompress."
            )
        k = _size.count(self.fraction, self.k, n)
        width, longer = divmod(n, k)
        interval = jnp.arange(k, dtype=jnp.int32)
        start = interval * width + jnp.minimum(interval, longer)
        size = width + (interval < longer).astype(jnp.int32)
        offset = _hash.keyed_bits(rng.shared, k) % size.astype(jnp.uint32)
        return start + offset.astype(jnp.int32), size.astype(jnp.float32)
