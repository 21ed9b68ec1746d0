"""Several arrays as one vector, for one collective of them all, and back."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


def cut(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Consecutive pieces of a vector, of these sizes."""
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1]) if sizes else []


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
