"""Trees of arrays: shapes, dtypes, and the paths of leaves as text."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any
"""A nest of containers with arrays (or shapes) at its leaves."""

Like: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""Anything that has a shape and a dtype."""


def spec(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def by_path(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Map the path of each leaf to the leaf, in the order of the leaves.

    A path is "layers/0/w", with the keys, positions and fields on the way between slashes. If two
    leaves of the tree have the same text, as those of {"a/b": x, "a": {"b": y}}, a slash in a key
    of theirs becomes %2F: "a%2Fb" and "a/b". Keys that differ in their type alone, as 1 and "1",
    have the form of JAX: "[1]" and "['1']". The names of all other leaves stay as they are.
    """
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    names = [_plain(path) for path, _ in pairs]
    for text in (_quoted, jax.tree_util.keystr):
        times = Counter(names)
        names = [
            text(path) if times[name] > 1 else name
            for (path, _), name in zip(pairs, names, strict=True)
        ]
    if len(set(names)) < len(names):
        names = [jax.tree_util.keystr(path) for path, _ in pairs]
    return {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True)}


def _plain(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _quoted(path: tuple[Any, ...]) -> str:
    keys = (_plain((key,)) for key in path)
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)
