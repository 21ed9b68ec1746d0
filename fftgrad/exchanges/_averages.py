"""How what all workers sent becomes one, where each can be seen apart."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._values import check_count, value
from fftgrad.codecs.quantizers import _scale
from fftgrad.exchanges._parts import Vectors
from fftgrad.ops import _joined

Decode = Callable[[Any], Vectors]


class Average(abc.ABC):
    """Contract: what `AllGather(average=...)` puts in the place of the mean of all payloads."""

    @abc.abstractmethod
    def of(
        self, decode: Decode, sent: Any, counts: jax.Array, shares: jax.Array | None = None
    ) -> Vectors:
        """What takes the place of the mean, the same bits on all workers.

        Args:
          decode: what one payload stands for.
          sent: the payloads of all w workers, stacked.
          counts: which of them count, bool[w].
          shares: of each in the mean, float32[w], of which those that count add up to 1; the same
            for all if left out.
        """


@dataclasses.dataclass(frozen=True)
class MedianNormClip(Average):
    """Value: an average; the mean, after what is longer than the median worker's is cut to it.

    With v_i what worker i sent of a part, a leaf with `Layout("leaf")`,

        mean of v_i · min(1, median_j ||v_j|| / ||v_i||).

    The median is that of those who sent anything but zeros. Lengths are of what was sent, with the
    weights of the workers in it. Islands clip without their weights, and take a mean by them after.

    A worker that is off, with bad data or a rate too high, weighs no more than the others do, and
    fewer than half of them cannot make the result longer than the rest of them would.

    Claims: the mean where all are equally long.

    Differs from the paper: the median of an even number of lengths is half-way between the two in
      the middle, where the authors' code takes the lower one.

    Example:
      >>> exchange = fg.AllGather(fg.Identity(), fg.exchanges.MedianNormClip())
      >>> x = jnp.array([[1.0], [4.0], [4.0], [1024.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Channel("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([3.25], dtype=float32)

    References:
      "Covenant-72B", 2026, arXiv:2603.08163.
    """

    def of(
        self, decode: Decode, sent: Any, counts: jax.Array, shares: jax.Array | None = None
    ) -> Vectors:
        def lengths(payload: Any) -> jax.Array:
            return jnp.stack([_scale.norms(v[None])[1][0] for v in decode(payload)])

        norms = lax.map(lengths, sent)  # [workers, parts]; one at a time, to hold one at a time
        speaks = counts[:, None] & (norms != 0)
        median = _median(jnp.where(speaks, norms, jnp.inf), jnp.sum(speaks, axis=0))
        clip = jnp.minimum(1.0, median[None] / _scale.divisor(norms))
        weights = jnp.where(counts[:, None], clip, 0.0)
        if shares is None:
            share = weights / jnp.maximum(1.0, jnp.sum(counts, dtype=weights.dtype))
        else:
            share = shares[:, None] * weights
        return _weighted_sum(decode, sent, share)


@value
class TrimmedMean(Average):
    """Value: an average; in each coordinate the mean without the largest and the smallest.

    Islands take the mean of the rest by their weights. It holds what all workers sent at once, w
    vectors. Where a codec sends few coordinates, most of what is trimmed are zeros or the only
    values there are: it is for codecs that send all of them.

    Args:
      trim: how many to leave out at either end, at least 1 and fewer than half of the workers.

    Claims: up to `trim` workers cannot move a coordinate beyond what the others sent.

    Raises:
      ValueError: if `trim` is below 1; while tracing, if it leaves nothing of so many workers.

    Example:
      >>> exchange = fg.AllGather(fg.Identity(), fg.exchanges.TrimmedMean(trim=1))
      >>> x = jnp.array([[1.0], [3.0], [2.0], [1000.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Channel("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2.5], dtype=float32)

    References:
      Yin et al., ICML 2018, arXiv:1803.01498.
    """

    trim: int = 1

    def __post_init__(self) -> None:
        check_count("TrimmedMean(trim)", self.trim, "leave it out.")

    def of(
        self, decode: Decode, sent: Any, counts: jax.Array, shares: jax.Array | None = None
    ) -> Vectors:
        (workers,) = counts.shape
        if 2 * self.trim >= workers:
            raise ValueError(
                f"TrimmedMean(trim): must leave some of {workers} workers, got {self.trim} at "
                "either end; use fewer, or MedianNormClip()."
            )
        # Those that do not count come last, and what is trimmed moves in front of them. Where fewer
        # than needed count, they are too few to tell who is off: nothing is trimmed.
        number = jnp.sum(counts)
        trim = jnp.where(2 * self.trim < number, self.trim, 0)
        place = jnp.arange(workers)
        kept = (place >= trim) & (place < number - trim)
        share = jnp.where(kept, 1.0, 0.0) / jnp.maximum(1, number - 2 * trim)

        def average(stacked: jax.Array) -> jax.Array:
            ordered = jnp.sort(jnp.where(counts[:, None], stacked, jnp.inf), axis=0)
            return jnp.sum(jnp.where(kept[:, None], ordered, 0.0) * share[:, None], axis=0)

        def weighted(stacked: jax.Array, shares: jax.Array) -> jax.Array:
            values = jnp.where(counts[:, None], stacked, jnp.inf)
            spread = jnp.broadcast_to(shares[:, None], values.shape)
            ordered, own = lax.sort((values, spread), dimension=0, num_keys=1)
            own = jnp.where(kept[:, None], own, 0.0)
            total = jnp.sum(jnp.where(kept[:, None], ordered, 0.0) * own, axis=0)
            return total / jnp.sum(own, axis=0)

        rows = lax.map(decode, sent)
        if shares is None:
            return tuple(average(stacked) for stacked in rows)
        return tuple(weighted(stacked, shares) for stacked in rows)


def _median(values: jax.Array, number: jax.Array) -> jax.Array:
    """The median of the smallest of each column, so many in each."""
    ordered = jnp.sort(values, axis=0)
    middle = jnp.stack([jnp.maximum(number - 1, 0) // 2, number // 2])
    return jnp.mean(jnp.take_along_axis(ordered, middle, axis=0), axis=0)


def _weighted_sum(decode: Decode, sent: Any, shares: jax.Array) -> Vectors:
    """The sum of share [workers, parts] · vector, in the workers' order."""

    def add(totals: Vectors, row: Any) -> tuple[Vectors, None]:
        payload, own = row
        each = zip(totals, _joined.unstack(own), decode(payload), strict=True)
        return tuple(t + w * v for t, w, v in each), None

    like = jax.eval_shape(decode, jax.tree.map(lambda leaf: leaf[0], sent))
    zeros = tuple(jnp.zeros(v.shape, v.dtype) for v in like)
    return lax.scan(add, zeros, (sent, shares))[0]
