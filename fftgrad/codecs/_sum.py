"""Sums of what payloads stand for, in the order of the workers, so that replicas stay equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import Codec, Like, Payload, Sparse, Step
from fftgrad.codecs import _chain
from fftgrad.codecs._chain import payload_spec
from fftgrad.ops import _platform
from fftgrad.ops._shapes import spec

UNROLLED, LARGE = 8, 1 << 16
"""Up to how many payloads, and from how many values on, payloads are added without a loop."""
DECODED = 8
"""Arrays that decoding takes for each value that is sent."""


def add(
    codec: Codec, total: jax.Array, payload: Payload, scale: jax.Array | float, step: Step
) -> jax.Array:
    """`total` + scale · what the payload stands for; in place where that is sparse."""
    few = _chain.sparse(codec, payload, spec(total), step)
    if few is None:
        return total + scale * codec.decompress(payload, spec(total), step)
    return few.add_to(total, scale)


def is_sparse(codec: Codec, like: Like, step: Step) -> bool:
    """Whether payloads stand for values at few positions."""
    few = jax.eval_shape(
        lambda payload: _chain.sparse(codec, payload, like, step), payload_spec(codec, like)
    )
    return few is not None


def add_each(
    codec: Codec,
    total: jax.Array,
    payloads: Payload,
    scale: jax.Array | float,
    step: Step,
    *,
    shards: bool = False,
) -> jax.Array:
    """`total` + scale · what each of the stacked payloads stands for, one after the other.

    The scale is one for all, or an array of one for each. Payloads of shards, one from each
    worker, take no more memory whole than a gradient: on a GPU they are decoded side by side.
    """
    like = spec(total)
    workers = jax.tree.leaves(payloads)[0].shape[:1]
    scales = jnp.broadcast_to(jnp.asarray(scale, total.dtype), workers)

    def sparse(payload: Payload) -> Sparse | None:
        return _chain.sparse(codec, payload, like, step)

    def one_by_one(total: jax.Array, payloads: Payload) -> jax.Array:
        return _fold(total, (payloads, scales), lambda t, row: add(codec, t, row[0], row[1], step))

    def together(total: jax.Array, group: tuple[Payload, jax.Array]) -> jax.Array:
        # Only the sum has an order. What comes before it takes the kernels of a single payload.
        rows = jax.vmap(sparse)(group[0])
        return _fold(total, (rows, group[1]), lambda t, row: row[0].add_to(t, row[1]))

    def whole(total: jax.Array, payloads: Payload) -> jax.Array:
        rows = jax.vmap(lambda payload: codec.decompress(payload, like, step))(payloads)
        return total + jnp.sum(scales.reshape(-1, *[1] * total.ndim) * rows, axis=0)

    if shards:
        return _platform.dependent(total, payloads, cpu=one_by_one, default=whole)
    few = jax.eval_shape(sparse, payload_spec(codec, like))
    if few is None:
        return one_by_one(total, payloads)
    size = _together(workers[0], few.positions.size, total.size)

    def at_once(total: jax.Array, payloads: Payload) -> jax.Array:
        if size == workers[0]:
            return together(total, (payloads, scales))
        groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (payloads, scales))
        return lax.scan(lambda total, group: (together(total, group), None), total, groups)[0]

    return _platform.dependent(total, payloads, cpu=one_by_one, default=at_once)


def _together(workers: int, slots: int, size: int) -> int:
    """How many payloads are decoded side by side: a divisor of their number.

    All of them, unless what is decoded would take more memory than what it is added to: `DECODED`
    arrays of so many slots each. Of a prime number of workers it is then one at a time.
    """
    if size < LARGE:
        return workers
    most = max(1, size // (DECODED * max(1, slots)))
    return max(d for d in range(1, workers + 1) if workers % d == 0 and d <= most)


def _fold(total: jax.Array, rows: Any, add: Callable[[jax.Array, Any], jax.Array]) -> jax.Array:
    """`add(add(total, row), row)`... of all rows."""
    count = jax.tree.leaves(rows)[0].shape[0]

    def add_row(i: jax.Array, total: jax.Array) -> jax.Array:
        return add(total, jax.tree.map(lambda leaf: leaf[i], rows))

    # A pass over a row that is chosen while running is not vectorized, and sums of known rows are
    # one pass; but each takes its time to compile.
    unroll = count <= UNROLLED and total.size >= LARGE
    return lax.fori_loop(0, count, add_row, total, unroll=unroll)
