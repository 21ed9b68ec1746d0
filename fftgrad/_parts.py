"""The arrays that travel together: each through a codec of its own."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fftgrad._base import Codec, CodecRule, Like, PyTree, Rng


def codecs(codec: Codec | CodecRule, like: PyTree) -> list[Codec]:
    """The codec of each part."""
    if isinstance(codec, Codec):
        return [codec for _ in jax.tree.leaves(like)]
    return [codec(name_of(path), part) for path, part in jax.tree.leaves_with_path(like)]


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a part in a dict of them; empty for an array on its own."""
    return "".join(str(getattr(entry, "key", entry)) for entry in path)


def vectors(x: PyTree) -> list[jax.Array]:
    """Each part, flat."""
    return [jnp.ravel(part) for part in jax.tree.leaves(x)]


def vector_likes(like: PyTree) -> list[Like]:
    """The shape and dtype of each part, flat."""
    return [jax.eval_shape(jnp.ravel, part) for part in jax.tree.leaves(like)]


def rebuild(flat: Sequence[jax.Array], like: PyTree) -> PyTree:
    """The parts in their shapes, from flat ones."""
    leaves, structure = jax.tree.flatten(like)
    shaped = [a.reshape(leaf.shape) for a, leaf in zip(flat, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def unzip(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Pairs as two lists."""
    both = list(pairs)
    return [a for a, _ in both], [b for _, b in both]


def rngs(rng: Rng, count: int) -> list[Rng]:
    """Randomness for each part; that of the first is `rng` itself."""

    def fold(i: int) -> Rng:
        return Rng(jax.random.fold_in(rng.shared, i), jax.random.fold_in(rng.local, i))

    return [rng, *map(fold, range(1, count))][:count]


def all_finite(x: PyTree) -> jax.Array:
    """Whether every value of every array is finite."""
    # A number less itself is zero, anything else NaN. The sum takes one pass, where XLA for CPUs
    # writes out an array of booleans before it reduces it.
    flags = [jnp.isfinite(jnp.sum(leaf - leaf)) for leaf in jax.tree.leaves(x)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), bool)


def where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition holds, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def to_shards(part: jax.Array, workers: int) -> jax.Array:
    """A part, padded with zeros, as one row for each worker."""
    flat = part.ravel()
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)


def from_shards(shards: Sequence[jax.Array], like: PyTree) -> PyTree:
    """The inverse of `to_shards`, for all parts."""
    leaves = jax.tree.leaves(like)
    flat = [rows.ravel()[: leaf.size] for rows, leaf in zip(shards, leaves, strict=True)]
    return rebuild(flat, like)


def shard_likes(like: PyTree, workers: int) -> PyTree:
    """The shape and dtype of each part's rows."""
    sizes = [-(-part.shape[0] // workers) for part in vector_likes(like)]
    shards = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    return jax.tree.unflatten(jax.tree.structure(like), shards)


def cut(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Consecutive pieces of a vector, of these sizes."""
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1]) if sizes else []


def as_one(
    leaves: Sequence[jax.Array],
) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """Real and complex arrays as one float32 vector, and the inverse: for one sum of them all."""
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
                piece = jax.lax.complex(*jnp.split(piece, 2))
            out.append(piece.reshape(shape))
        return out

    return whole, restore
