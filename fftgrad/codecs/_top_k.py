"""Selectors of a fixed number of coefficients: the largest of all, of each chunk, or random."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Codec, Compressed, Like, Payload, PyTree, Selector, Sparse, Step
from fftgrad._values import check, check_count, check_type, check_within, value
from fftgrad.ops import _codes, _finite, _platform, _positions, _random, _selection, _shapes


def check_size(owner: str, fraction: float | None, k: int | None) -> None:
    argument, found = f"{owner}(fraction, k)", f"fraction={fraction}, k={k}"
    one = (fraction is None) != (k is None)
    check(one, argument, "have exactly one of the two", found, f"use {owner}(fraction=0.01).")
    one = isinstance(fraction, int) and fraction == 1
    rule, remedy = "be a float", f"use {owner}(k=1), or fraction=1.0 for all."
    check_type(not one, f"{owner}(fraction)", rule, fraction, remedy)
    if fraction is not None:
        check_static(f"{owner}(fraction)", fraction, float | int)
        remedy = f"to drop a share theta use {owner}(fraction=1 - theta)."
        check_within(f"{owner}(fraction)", fraction, "(0, 1]", remedy)
    if k is not None:
        check_static(f"{owner}(k)", k, int)
        check_count(f"{owner}(k)", k, f"use {owner}(k=1).")


def check_static(argument: str, number: object, kind: Any) -> None:
    fine = isinstance(number, kind) and not isinstance(number, bool)
    rule = "be a Python number, because the size of the payload is static"
    remedy = "use Scheduled to change it, and static_args in optax.inject_hyperparams."
    check_type(fine, argument, rule, number, remedy)


def kept(fraction: float | None, k: int | None, n: int) -> int:
    if k is not None:
        return min(k, n)
    # Round first: 0.07 * 100 is slightly above 7 in binary.
    return max(1, math.ceil(round((fraction or 0.0) * n, 6)))


@value
class _Share(Selector):
    fraction: float | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        check_size(type(self).__name__, self.fraction, self.k)

    def shard(self, parts: int) -> Codec:
        return dataclasses.replace(self, k=None if self.k is None else -(-self.k // parts))

    def _k(self, n: int) -> int:
        return kept(self.fraction, self.k, n)


@value
class TopK(_Share):
    """Selector: keep the k coefficients of largest magnitude.

    Let S be the positions of the k largest |x_i|. Among equal magnitudes, the lowest positions are
    kept. The payload holds S in ascending order, and the values x_i at these positions. The
    magnitude of a complex coefficient is its modulus, or zero if both of its parts are subnormal.
    NaN counts as the largest magnitude.

    Args:
      fraction: share of the n coefficients kept, 0 < fraction <= 1; k = ceil(fraction · n).
      k: number of coefficients kept, in place of `fraction`; all n if n < k.

    Wire: x float32[n] | complex64[n] -> main of that dtype [k]; side: positions, as the smaller of
      an Elias-Fano code, k(2 + log2(n/k))/8 bytes, and a bitmap, n/8 bytes; empty if k = n.

    Claims: biased; not summable; ||x - C(x)||² <= (1 - k/n) ||x||².

    Differs from the paper: the paper always sends bitmaps, and selects by a sort or approximately.

    Example:
      >>> fg.compress(fg.TopK(fraction=0.5), jnp.array([1.0, -4.0, 2.0, 0.5])).main
      Array([-4.,  2.], dtype=float32)

    References:
      Wang et al., HPDC 2020, arXiv:1811.08596. Elias, J. ACM 21(2), 1974, for the code. Aji and
      Heafield, EMNLP 2017, arXiv:1704.05021.
    """

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        k = self._k(x.size)
        if k == x.size:
            return Compressed(Payload(x))
        # Without the barrier, XLA concatenates the leaves again for each reader of the vector.
        x = lax.optimization_barrier(x)
        positions, code = _positions.encode(_selection.largest(*_selection.keys(x), k), k, x.size)
        return Compressed(Payload(x[positions], code))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        return payload.main if self._k(n) == n else super().decompress(payload, like, step)

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse | None:
        (n,) = like.shape
        if self._k(n) == n:
            return None
        return Sparse(self.positions(payload.side, n, step), payload.main)

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        if self._k(n) == n:
            return jnp.arange(n, dtype=jnp.int32)
        return _positions.decode(side, self._k(n), n)


@value
class ChunkTopK(Selector):
    """Selector: keep the k coefficients of largest magnitude in each chunk.

    The vector is padded with zeros to chunks of c values. With k = 1 the selection is ScaleCom's
    chunk-wise quasi-sort, which needs one pass over the data. The payload holds the positions as
    offsets within chunks, in Elias-Fano code or as a bitmap, whichever is shortest.

    Args:
      chunk: c, at least 2; a shorter vector is one chunk.
      k: number of coefficients kept in each chunk, 1 <= k <= chunk.

    Wire: x float32[n] | complex64[n] -> main of that dtype [m], m = k · ceil(n/c); side: positions,
      at most m · min(ceil(log2 c), 2 + log2(c/k)) bits; empty if k = c.

    Claims: biased; not summable; ||x - C(x)||² <= (1 - k/c) ||x||².

    Example:
      >>> x, codec = jnp.array([1.0, -4.0, 0.2, 0.1]), fg.ChunkTopK(chunk=2)
      >>> fg.decompress(codec, fg.compress(codec, x), x)
      Array([ 0. , -4. ,  0.2,  0. ], dtype=float32)

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125 (ScaleCom). Peng et al., 2024, arXiv:2411.19870.
    """

    chunk: int
    k: int = 1

    def __post_init__(self) -> None:
        check_count("ChunkTopK(chunk)", self.chunk, "use ChunkTopK(chunk=64).", least=2)
        check_count("ChunkTopK(k)", self.k, "use k=1.", 1, self.chunk)

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        chunk, k = self._sizes(x.size)
        read, key = _selection.keys(x)
        rows = _shapes.rows(key(read), chunk)
        if k == 1:
            offsets = jnp.argmax(rows, axis=1)[:, None]
        else:
            # Values that are not finite become the largest.
            keys = jnp.minimum(rows, jnp.uint32(0x7F800000))
            by_top_k = functools.partial(_by_top_k, k=k)
            by_digits = functools.partial(_selection.largest_of_rows, k=k)
            choose = functools.partial(_platform.dependent, cpu=by_top_k, default=by_digits)
            offsets = (by_top_k if k <= FAST else choose)(keys)
        offsets, chunks = offsets.astype(jnp.int32), len(offsets)
        side: PyTree = ()
        if k < chunk and _have_offsets(chunks, chunk, k):
            side = _codes.pack(offsets.astype(jnp.uint32).ravel(), (chunk - 1).bit_length())
        elif k < chunk:
            starts = chunk * jnp.arange(chunks, dtype=jnp.int32)[:, None]
            ascending = (starts + offsets).ravel()
            side = _positions.encode_positions(ascending, chunks * k, chunks * chunk)
        places = self.positions(side, x.size, step)
        return Compressed(Payload(jnp.take(x, places, mode="fill", fill_value=0), side))

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        chunk, k = self._sizes(n)
        chunks = -(-n // chunk)
        numbers = jnp.arange(chunks * k, dtype=jnp.int32)
        if k == chunk:
            return numbers
        if _have_offsets(chunks, chunk, k):
            offsets = _codes.unpack(side, (chunk - 1).bit_length(), chunks * k).astype(jnp.int32)
            return chunk * (numbers // k) + jnp.minimum(offsets, chunk - 1)
        return _positions.decode(side, chunks * k, chunks * chunk)

    def _sizes(self, n: int) -> tuple[int, int]:
        chunk = min(self.chunk, max(2, n))
        return chunk, min(self.k, chunk)


FAST = 16
"""Largest k for which `lax.top_k` is fast on GPUs. For a larger k, XLA sorts the rows there."""


def _by_top_k(keys: jax.Array, k: int) -> jax.Array:
    """Return the positions of the k largest keys of each row, ascending, int32[rows, k]."""
    # Compare the keys as floats, because XLA on GPUs has no fast top-k of integers.
    _, positions = lax.top_k(lax.bitcast_convert_type(keys, jnp.float32), k)
    return jnp.sort(positions, axis=1)


def _have_offsets(chunks: int, chunk: int, k: int) -> bool:
    """Return True if offsets within chunks take fewer words than other codes of the positions."""
    apart = _codes.words_for(chunks * k, (chunk - 1).bit_length())
    return apart <= _positions.words_for(chunks * k, chunks * chunk)


@value
class RandomK(_Share):
    """Selector: keep k coefficients at random positions, equal on all workers.

    The vector is cut into k intervals of about n/k values. From `step.shared`, each worker draws
    the same position in each interval, so no positions are sent and payloads can be summed.

    Args:
      fraction: share of the n coefficients kept, 0 < fraction <= 1; k = ceil(fraction · n).
      k: number of coefficients kept, in place of `fraction`; all n if n < k.

    Wire: x float32[n] | complex64[n] -> main of that dtype [k].

    Claims: biased; summable. If a value is not finite, no decoded value is finite.

    Differs from the paper: the paper draws k of all n positions. This codec draws one position from
      each of k intervals, so positions ascend. All values have about the same probability k/n.

    Example:
      >>> codec, x = fg.codecs.RandomK(k=2), jnp.array([1.0, 1.0, 2.0, 2.0])
      >>> fg.compress(codec, x, step=fg.Step.of(0)).main
      Array([1., 2.], dtype=float32)

    References:
      Stich, Cordonnier and Jaggi, NeurIPS 2018, arXiv:1809.07599.
    """

    @property
    def summable(self) -> bool:
        return True

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        kept = x[self.positions((), x.size, step)]
        # Report a NaN at any position: error feedback would keep an unsent NaN forever.
        return Compressed(Payload(kept + _finite.poison(x).astype(x.dtype)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        (n,) = like.shape
        kept = Sparse(self.positions((), n, step), payload.main)
        # `compress` makes all values NaN, or none. NaN is in the new array, because XLA would copy
        # any other one before it scatters.
        start = jnp.where(jnp.isfinite(payload.main[0]), 0.0, jnp.nan)
        whole = jnp.full((n,), start, payload.main.dtype)
        return kept.put_into(whole)

    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        k = self._k(n)
        width, longer = divmod(n, k)
        interval = jnp.arange(k, dtype=jnp.int32)
        start = interval * width + jnp.minimum(interval, longer)
        size = width + (interval < longer).astype(jnp.int32)
        remedy = " to compress and decompress"
        offset = _random.drawn_bits(self, step.shared, k, remedy) % size.astype(jnp.uint32)
        return start + offset.astype(jnp.int32)
