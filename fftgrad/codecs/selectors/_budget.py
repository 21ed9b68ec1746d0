"""As many of the largest coefficients as a message of fixed size holds."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Compressed, Like, Payload, PyTree, Selector, Sparse, Step
from fftgrad._values import check_count, check_within, value
from fftgrad.codecs.quantizers import _window
from fftgrad.codecs.selectors import _fill, _top_k
from fftgrad.ops import _scan, _wire
from fftgrad.ops.packing import _exp_golomb

HEAD = 8
"""Bytes before the codes: the step, and how many coefficients there are."""

LEAST = HEAD + 12

BITS = 6
"""No more coefficients than would leave each of them so many bits."""

MOST = 1 << 26
"""Nor more than that, or their bits could not be counted in 32 bits."""


class BudgetSide(NamedTuple):
    """Side: how many coefficients there are and the order of their gaps' codes, and the codes."""

    head: jax.Array
    words: jax.Array


@value
class Budget(Selector):
    """Selector: as many of the largest coefficients as fit, in steps of the smallest of them.

    With a step T, x_i is sent if q_i = floor(|x_i| / T) is not zero: as q_i, its sign, and the gap,
    the number of coefficients not sent before it. Both have exponential-Golomb codes, gaps of a
    fitted order r, q of order 0: 1 + r + 2 floor(log2((gap >> r) + 1)) and 2 + 2 floor(log2 q)
    bits. So large coefficients have more levels, and positions that cluster take few bits. T is the
    smallest that fits, of 32 an octave, but at least about 2^-16 of the largest coefficient. The
    bits left are filled with the first of those that the next step would add, as q = 1.

    q stands for 2q(q + 1) / (2q + 1) steps, the point of [q, q + 1] whose largest relative error is
    least: no coefficient is worse than not sent. It selects and quantizes, so it comes last in a
    chain. Real and imaginary parts are coefficients of their own. With an error this small,
    `ErrorFeedback()` without decay trained best; see docs/results/training.md.

    Args:
      ratio: the bytes of the vector in float32 (complex64) over those sent: `Budget(ratio=100)`
        sends a bfloat16 gradient in 50 times fewer bytes.
      bytes: how many, instead, for each bucket or leaf of a `Layout`. `TwoStage` gives each of its
        w shards a w-th.

    Wire: x float32[n] | complex64[n] -> main float32[1], the step; side uint32 words. In all
      4 floor(bytes / 4) bytes, with bytes = 4n / ratio (8n if complex), but at least 20. No more
      coefficients are sent than leave 6 bits to each.

    Claims: biased; not summable; the relative error of a coefficient that is sent is at most 1/3,
      of those that fill the last bits 3/8, but for float32 rounding, and where it is beyond 2^15
      steps at most 2^-15. What it sends is the same on all platforms, to the bit. Coefficients
      below 2^-125 count as zero.

    Differs from the paper: QSGD draws its levels by chance, in units of the norm; gaps and levels
      there are in recursive Elias codes, which are read one after the other.

    Raises:
      TypeError: if an argument is traced: the size of the payload has to be static.

    Example:
      >>> x, codec = 1.0 / (1.0 + jnp.arange(1000.0)), fg.Budget(ratio=50)
      >>> back = fg.decompress(codec, fg.compress(codec, x), like=x)
      >>> int(jnp.sum(back != 0)), bool(jnp.linalg.norm(back - x) < 0.1 * jnp.linalg.norm(x))
      (96, True)

    References:
      Alistarh et al., NeurIPS 2017, arXiv:1610.02132, for levels and gaps in Elias codes. Teuhola,
      "A Compression Method for Clustered Bit-Vectors", Information Processing Letters 7(6), 1978.
    """

    ratio: int | float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.bytes is None):
            raise ValueError(
                f"Budget(ratio, bytes): exactly one must be given, got ratio={self.ratio}, "
                f"bytes={self.bytes}; use Budget(ratio=100)."
            )
        _top_k.check_static("Budget(ratio)", self.ratio, float | int)
        _top_k.check_static("Budget(bytes)", self.bytes, int)
        if self.ratio is not None:
            check_within("Budget(ratio)", self.ratio, "[1, inf)", "use ratio=100.")
        if self.bytes is not None:
            remedy = f"use bytes={LEAST}, one coefficient and the head."
            check_count("Budget(bytes)", self.bytes, remedy, least=LEAST)

    @property
    def last(self) -> bool:
        return True

    def shard(self, parts: int) -> "Budget":
        if self.bytes is None:
            return self
        return dataclasses.replace(self, bytes=max(LEAST, self.bytes // parts))

    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        values = _window.as_real("Budget", x)
        words, most = self._words(x), self._most(x)
        candidates = _fill.Candidates.of(values, most)
        order = _fill.order_of(candidates)
        level = _fill.finest(candidates, order, words)
        kept, q = candidates.at(level)
        # What is not finite must be seen, and nothing of it is sent but that.
        finite = jnp.isfinite(candidates.scale)
        kept = jnp.where(finite, kept, lax.iota(jnp.int32, kept.size) == 0)
        gaps = jnp.where(finite, _fill.gaps_of(candidates.positions, kept), 0)
        q = jnp.where(finite, q, 1)
        rows = (gaps, 2 * (q - 1) + candidates.negative)
        codes = _exp_golomb.encode(rows, (order, _fill.SIGN), kept, words)
        count = jnp.sum(kept, dtype=jnp.int32)
        head = (count | order << 27).astype(jnp.uint32)[None]
        unit = candidates.scale / _fill.resolution(level // _fill.CUTS)
        main = _wire.without_gradient(unit[None], x)  # the step, of which values are multiples
        return Compressed(Payload(main, BudgetSide(head, codes)))

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        few = self._decoded(payload, like)
        whole = few.put_into(jnp.zeros((_window.count(like),), jnp.float32))
        return _window.shaped(whole, like)

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse | None:
        if jnp.issubdtype(like.dtype, jnp.complexfloating):
            return None
        return self._decoded(payload, like)

    def positions(self, side: BudgetSide, n: int, step: Step) -> jax.Array:
        like = jax.ShapeDtypeStruct((n,), jnp.float32)
        return self._decoded(Payload(jnp.ones((1,)), side), like).positions

    def _decoded(self, payload: Payload, like: Like) -> Sparse:
        n, most = _window.count(like), self._most(like)
        head = payload.side.head[0].astype(jnp.int32)
        count, order = head & (1 << 27) - 1, head >> 27
        gaps, levels = _exp_golomb.decode(payload.side.words, (order, _fill.SIGN), most)
        slot = lax.iota(jnp.int32, most)
        used = slot < count
        at = _scan.cumsum(jnp.where(used, gaps + 1, 0)) - 1
        q = (levels >> 1).astype(jnp.float32) + 1.0
        step = payload.main[0]
        # The largest may lie beyond what float32 holds; a step that is no number is not hidden.
        bound = jnp.where(jnp.isfinite(step), jnp.finfo(jnp.float32).max, jnp.inf)
        size = jnp.minimum(step * (q + q / (2 * q + 1)), bound)
        value = jnp.where(levels & 1 == 1, -size, size)
        return Sparse(jnp.where(used, at, n + slot), jnp.where(used, value, 0.0))

    def _words(self, like: Like) -> int:
        """How many words are left for codes."""
        size = self.bytes or int(4 * _window.count(like) / (self.ratio or 1.0))
        return max(size - HEAD, 12) // 4

    def _most(self, like: Like) -> int:
        """How many coefficients are sent at most."""
        return min(_window.count(like), max(1, 32 * self._words(like) // BITS), MOST)
