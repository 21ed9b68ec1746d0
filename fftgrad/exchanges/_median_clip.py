"""A mean in which no worker counts for more than the median worker does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad.codecs import _quantizers
from fftgrad.exchanges._parts import Vectors
from fftgrad.ops import _shapes


def clipped_mean(decode: Callable[[Any], Vectors], sent: Any, shares: jax.Array) -> Vectors:
    """Average what workers sent, after cutting longer vectors to the median length.

    With v_i the vector of worker i for a part and s_i its share of the mean,

        Σ s_i v_i · min(1, median_j ||v_j|| / ||v_i||).

    The median is over the workers with a share above 0 that sent anything but zeros.

    Args:
      decode: what one payload stands for.
      sent: the payloads of all w workers, stacked.
      shares: of each worker in the mean, float32[w].
    """

    def lengths(payload: Any) -> jax.Array:
        return jnp.stack([_quantizers.row_norms(v[None])[1][0] for v in decode(payload)])

    norms = lax.map(lengths, sent)  # [workers, parts]; one at a time, to hold one at a time
    counts = (shares > 0)[:, None]
    speaks = counts & (norms != 0)
    median = _median(jnp.where(speaks, norms, jnp.inf), jnp.sum(speaks, axis=0))
    clip = jnp.minimum(1.0, median[None] / _quantizers.divisor(norms))
    weights = shares[:, None] * jnp.where(counts, clip, 0.0)

    def add(totals: Vectors, row: Any) -> tuple[Vectors, None]:
        payload, own = row
        each = zip(totals, _shapes.unstack(own), decode(payload), strict=True)
        return tuple(t + w * v for t, w, v in each), None

    like = jax.eval_shape(decode, jax.tree.map(lambda leaf: leaf[0], sent))
    zeros = tuple(jnp.zeros(v.shape, v.dtype) for v in like)
    return lax.scan(add, zeros, (sent, weights))[0]  # in the workers' order


def _median(values: jax.Array, number: jax.Array) -> jax.Array:
    """The median of the smallest of each column, so many in each."""
    ordered = jnp.sort(values, axis=0)
    middle = jnp.stack([jnp.maximum(number - 1, 0) // 2, number // 2])
    return jnp.mean(jnp.take_along_axis(ordered, middle, axis=0), axis=0)
