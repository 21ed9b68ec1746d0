"""Parts that are alike go through one program, stacked.

A model has many leaves of few shapes. What is traced, compiled and launched grows with the shapes.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad._contracts import PyTree
from fftgrad.ops import _platform, _shapes

SMALL = 1 << 15
"""Up to how many values at a time parts go side by side on a CPU, too."""


def each(
    verb: Callable[..., Any],
    statics: Sequence[tuple[Hashable, ...]],
    rows: Sequence[PyTree],
    *,
    together: bool = True,
) -> list[Any]:
    """`verb(*static, row)` of each part, where parts with equal statics and shapes become one call.

    Args:
      verb: a pure function, of what is static and a pytree of arrays.
      statics: what each part has that is no array: its codec, the shape to decode to.
      rows: the arrays of each part.
      together: whether parts may share a call.
    """
    out: list[Any] = [None] * len(rows)
    groups = _groups(statics, rows) if together else [[i] for i in range(len(rows))]
    for numbers in groups:
        run = functools.partial(verb, *statics[numbers[0]])
        if len(numbers) == 1:
            out[numbers[0]] = run(rows[numbers[0]])
            continue
        results = _run_stacked(run, _stack([rows[i] for i in numbers]))
        pieces = jax.tree.map(_shapes.unstack, results)
        for place, i in enumerate(numbers):
            out[i] = jax.tree.map(lambda _, own, place=place: own[place], results, pieces)
    return out


def _groups(statics: Sequence[Hashable], rows: Sequence[PyTree]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for i, (static, row) in enumerate(zip(statics, rows, strict=True)):
        leaves, structure = jax.tree.flatten(row)
        groups.setdefault((static, structure, *map(jax.typeof, leaves)), []).append(i)
    return list(groups.values())


def _stack(rows: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def _run_stacked(run: Callable[[PyTree], PyTree], stacked: PyTree) -> PyTree:
    side_by_side = jax.vmap(run)
    if max((leaf[0].size for leaf in jax.tree.leaves(stacked)), default=0) <= SMALL:
        return side_by_side(stacked)
    # Side by side both sides of a branch are taken, which on a CPU costs more passes.
    return _platform.dependent(stacked, cpu=functools.partial(lax.map, run), default=side_by_side)
