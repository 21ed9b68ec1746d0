"""Sums of decoded payloads in the order of the workers, so that all replicas get equal sums."""

import functools
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
"""The loop over payloads is unrolled for at most UNROLLED payloads of at least LARGE values."""
DECODED = 8
"""Number of values that the decoder allocates for each sent value, about."""


def add(
    codec: Codec, total: jax.Array, payload: Payload, scale: jax.Array | float, step: Step
) -> jax.Array:
    """Return `total` + scale · decoded payload, in place if the payload is sparse."""
    few = _chain.sparse(codec, payload, spec(total), step)
    if few is None:
        return total + scale * codec.decompress(payload, spec(total), step)
    return few.add_to(total, scale)


def slots(codec: Codec, like: Like) -> int | None:
    """Return the number of positions in a decoded payload; None if `sparse` returns None."""
    return _slots(codec, like.shape, like.dtype)


@functools.lru_cache(maxsize=4096)
def _slots(codec: Codec, shape: tuple[int, ...], dtype: Any) -> int | None:
    like, step = jax.ShapeDtypeStruct(shape, dtype), Step.of(0)
    with _platform.one():
        few = jax.eval_shape(
            lambda payload: _chain.sparse(codec, payload, like, step), payload_spec(codec, like)
        )
    return None if few is None else few.positions.size


def add_each(
    codec: Codec,
    total: jax.Array,
    payloads: Payload,
    scale: jax.Array | float,
    step: Step,
    *,
    shards: bool = False,
) -> jax.Array:
    """Add scale · decoded payload to `total` for each of the stacked payloads, in order.

    The scale is one number, or an array with one number for each payload. With `shards`, a GPU
    decodes all payloads at once: the shards of all workers together are as large as a gradient.
    """
    like = spec(total)
    workers = jax.tree.leaves(payloads)[0].shape[:1]
    scales = jnp.broadcast_to(jnp.asarray(scale, total.dtype), workers)

    def sparse(payload: Payload) -> Sparse | None:
        return _chain.sparse(codec, payload, like, step)

    def one_by_one(total: jax.Array, payloads: Payload) -> jax.Array:
        return _fold(total, (payloads, scales), lambda t, row: add(codec, t, row[0], row[1], step))

    def together(total: jax.Array, group: tuple[Payload, jax.Array]) -> jax.Array:
        # Decode all payloads in the same kernels. Only the sum must follow the order of workers.
        rows = jax.vmap(sparse)(group[0])
        return _fold(total, (rows, group[1]), lambda t, row: row[0].add_to(t, row[1]))

    def whole(total: jax.Array, payloads: Payload) -> jax.Array:
        rows = jax.vmap(lambda payload: codec.decompress(payload, like, step))(payloads)
        return total + jnp.sum(scales.reshape(-1, *[1] * total.ndim) * rows, axis=0)

    if shards:
        return _platform.dependent(total, payloads, cpu=one_by_one, default=whole)
    few = slots(codec, like)
    if few is None:
        return one_by_one(total, payloads)
    size = _together(workers[0], few, total.size)

    def at_once(total: jax.Array, payloads: Payload) -> jax.Array:
        if size == workers[0]:
            return together(total, (payloads, scales))
        groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (payloads, scales))
        return lax.scan(lambda total, group: (together(total, group), None), total, groups)[0]

    return _platform.dependent(total, payloads, cpu=one_by_one, default=at_once)


def _together(workers: int, slots: int, size: int) -> int:
    """Return the number of payloads to decode at once, a divisor of the number of workers.

    The decoder must not allocate more values than the sum has.
    """
    if size < LARGE:
        return workers
    most = max(1, size // (DECODED * max(1, slots)))
    return max(d for d in range(1, workers + 1) if workers % d == 0 and d <= most)


def _fold(total: jax.Array, rows: Any, add: Callable[[jax.Array, Any], jax.Array]) -> jax.Array:
    """Return `add(add(total, row), row)`... over all rows."""
    count = jax.tree.leaves(rows)[0].shape[0]

    def add_row(i: jax.Array, total: jax.Array) -> jax.Array:
        return add(total, jax.tree.map(lambda leaf: leaf[i], rows))

    # XLA does not vectorize a loop over rows. If the loop is unrolled, XLA fuses all rows into one
    # pass, but each row adds compile time.
    unroll = count <= UNROLLED and total.size >= LARGE
    return lax.fori_loop(0, count, add_row, total, unroll=unroll)
