"""Trees of arrays: shapes, dtypes, and the paths of leaves as text."""

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
    becomes %2F: "a%2Fb" and "a/b". Keys that differ in their type alone, as 1 and "1", have the
    form of JAX: "[1]" and "['1']".
    """
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    for text in (_plain, _quoted, jax.tree_util.keystr):
        found = {text(path): leaf for path, leaf in pairs}
        if len(found) == len(pairs):
            break
    return found


def _plain(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _quoted(path: tuple[Any, ...]) -> str:
    keys = (_plain((key,)) for key in path)
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)
