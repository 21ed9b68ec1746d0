"""How a chain is undone: stage by stage, or where few coefficients are left, at their blocks only.

The functions here work on the stages of a chain. `sides` are theirs, in order.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fftgrad._contracts import Codec, Like, Payload, PyTree, Selector, Sparse, Step, Transform
from fftgrad.codecs import _call
from fftgrad.codecs._spec import payload_spec

SPARSE = 16
"""Blocks are undone one by one where those that hold a coefficient hold 1 value in 16, or fewer."""


Blocks = tuple[Transform, Selector, tuple[Codec, ...]]
"""A chain that is undone at the blocks of its coefficients."""


def sparse_blocks(stages: Sequence[Codec], like: Like) -> Blocks | None:
    """The plan for a chain that leaves hardly any block a coefficient; None for any other."""
    match stages:
        case (Transform() as transform, Selector() as selector, *rest):
            if selector.last or selector.summable or not _has_sparse(selector):
                return None
            (n,) = like.shape
            kept = payload_spec(selector, payload_spec(transform, like).main).main
            few = SPARSE * kept.size * transform.reach(n) <= n
            return (transform, selector, tuple(rest)) if few else None
        case _:
            return None


def undo(
    stages: Sequence[Codec], main: jax.Array, sides: Sequence[PyTree], like: Like, step: Step
) -> jax.Array:
    """The vector, shaped like `like`, that the stages made into `main` and `sides`."""
    if not stages:
        return main
    if (blocks := sparse_blocks(stages, like)) and (
        few := _at_blocks(blocks, main, sides, like, step)
    ):
        return few.put_into(jnp.zeros(like.shape, like.dtype))
    likes = [like]
    for stage in stages[:-1]:
        likes.append(payload_spec(stage, likes[-1]).main)
    for stage, side, target in reversed(list(zip(stages, sides, likes, strict=True))):
        main = _call.decompress(stage, Payload(main, side), target, step)
    return main


def sparse(
    stages: Sequence[Codec], main: jax.Array, sides: Sequence[PyTree], like: Like, step: Step
) -> Sparse | None:
    """What the stages made into `main` and `sides`, as values at few positions; None if not so."""
    if blocks := sparse_blocks(stages, like):
        return _at_blocks(blocks, main, sides, like, step)
    match stages:
        case (Selector() as selector, *rest) if _has_sparse(selector):
            values = undo(rest, main, sides[1:], payload_spec(selector, like).main, step)
            return selector.sparse(Payload(values, sides[0]), like, step)
        case _:
            return None


def _has_sparse(selector: Selector) -> bool:
    """Whether its `sparse` was written with its `decompress` or after it, and so agrees with it."""
    return issubclass(_author(selector, "sparse"), _author(selector, "decompress"))


def _author(selector: Selector, name: str) -> type:
    """The class that defines what a selector has by this name."""
    return next(kind for kind in type(selector).__mro__ if name in vars(kind))


def _at_blocks(
    blocks: Blocks, main: jax.Array, sides: Sequence[PyTree], like: Like, step: Step
) -> Sparse | None:
    transform, selector, rest = blocks
    coefficients = payload_spec(transform, like).main
    values = undo(rest, main, sides[2:], payload_spec(selector, coefficients).main, step)
    few = selector.sparse(Payload(values, sides[1]), coefficients, step)
    return None if few is None else transform.at_blocks(few, like, step)
