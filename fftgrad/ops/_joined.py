"""Several arrays as one, for one collective or one program of them all, and back."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fftgrad.ops import _platform

FEW = 8
"""Pieces of which so many may have a kernel each."""


def cut(x: jax.Array, sizes: Sequence[int], axis: int = 0) -> list[jax.Array]:
    """Consecutive pieces of an array, of these sizes along the axis, which is counted from 0.

    XLA makes one kernel for all readers of pieces that are equal, but not where each piece is at a
    place of its own that the compiler knows. Compiling a hundred leaves took three times as long.
    """
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    known = functools.partial(_at, starts, sizes, axis)
    if len(sizes) < FEW or not x.size or not jnp.issubdtype(x.dtype, jnp.number):
        return known(x)

    def hidden(x: jax.Array) -> list[jax.Array]:
        def places() -> list[jax.Array]:
            return [jnp.int32(start) for start in starts]

        # What a branch returns may be anything, for all that the compiler looks at.
        return _at(lax.cond(x.ravel()[0] == 0, places, places), sizes, axis, x)

    @custom_vmap
    def batched(x: jax.Array) -> list[jax.Array]:
        # Elsewhere a branch would wait for the device.
        return _platform.dependent(x, cpu=hidden, default=known)

    @batched.def_vmap
    def _(size: int, in_batched: list[bool], x: jax.Array) -> tuple[Any, Any]:
        del size, in_batched
        return cut(x, sizes, axis + 1), [True] * len(sizes)

    @jax.custom_jvp
    def pieces(x: jax.Array) -> list[jax.Array]:
        return batched(x)

    # A rule for `vmap` alone has no transpose.
    pieces.defjvp(lambda primals, tangents: (pieces(*primals), known(*tangents)))
    return pieces(x)


def _at(starts: Sequence[Any], sizes: Sequence[int], axis: int, x: jax.Array) -> list[jax.Array]:
    def one(start: Any, size: int) -> jax.Array:
        if isinstance(start, int):
            return lax.slice_in_dim(x, start, start + size, axis=axis)
        place, shape = [jnp.int32(0)] * x.ndim, list(x.shape)
        place[axis], shape[axis] = start, size
        return lax.dynamic_slice(x, place, shape, allow_negative_indices=False)

    return [one(start, size) for start, size in zip(starts, sizes, strict=True)]


def unstack(x: jax.Array) -> list[jax.Array]:
    """What `jnp.stack` made one array of."""
    return [row.reshape(x.shape[1:]) for row in cut(x, [1] * x.shape[0])]


def as_one(
    leaves: Sequence[jax.Array],
) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """Real and complex arrays as one float32 vector, and the inverse."""
    shapes = [(leaf.shape, jnp.issubdtype(leaf.dtype, jnp.complexfloating)) for leaf in leaves]
    flat = [
        jnp.stack([leaf.real, leaf.imag]).ravel() if is_complex else leaf.ravel()
        for leaf, (_, is_complex) in zip(leaves, shapes, strict=True)
    ]
    whole = jnp.concatenate(flat) if flat else jnp.zeros((0,), jnp.float32)

    def restore(vector: jax.Array) -> list[jax.Array]:
        out: list[jax.Array] = []
        pieces = cut(vector, [part.size for part in flat])
        for piece, (shape, is_complex) in zip(pieces, shapes, strict=True):
            if is_complex:
                piece = lax.complex(*jnp.split(piece, 2))
            out.append(piece.reshape(shape))
        return out

    return whole, restore
