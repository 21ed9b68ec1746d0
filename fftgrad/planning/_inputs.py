"""The workers of a plan and their axes, the shapes of its model, and values to time with."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_count
from fftgrad.exchanges import _bucketing
from fftgrad.planning._link import Link

AXIS, SLOW, FAST = "data", "slow", "fast"


class Groups(NamedTuple):
    """The axes of the workers, and their fast links."""

    axes: Mapping[str, int]  # number of workers along each axis, the slow one first
    axis_name: AxisName  # as in the code of a step
    fast: Link | None  # the link of the second axis, if there is one

    @property
    def slow(self) -> str:
        """The axis of the slow links."""
        return next(iter(self.axes))

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of workers along the slow links and along the fast ones."""
        slow, *fast = self.axes.values()
        return slow, math.prod(fast)

    def links(self, slow: Link) -> Link | dict[str, Link]:
        """The link of all, or that of each axis."""
        return slow if self.fast is None else dict(zip(self.axes, (slow, self.fast), strict=True))


def groups(workers: int, fast: tuple[int, Link] | None, axis_name: AxisName | None) -> Groups:
    """The workers of a plan and their axes."""
    name = (AXIS if fast is None else (SLOW, FAST)) if axis_name is None else axis_name
    _axes.check_names("plan(axis_name)", name)
    workers = check_count("plan(workers)", workers, "one exchanges nothing.", least=2)
    if fast is None:
        # All that a flat exchange knows of several axes is how many workers they have together.
        return Groups({name if isinstance(name, str) else AXIS: workers}, name, None)
    joined, link = fast
    if workers % joined or not 1 < joined < workers:
        raise ValueError(
            f"plan(fast): must be a divisor of the {workers} workers that leaves two groups at "
            f"least, got {joined}; leave it out where no links are fast."
        )
    names = _axes.names(name)
    if len(names) != 2:
        raise ValueError(
            f"plan(axis_name): must name the slow axis and the fast one, got {name!r}; use "
            "('slow', 'fast')."
        )
    sizes = (workers // joined, joined)
    return Groups(dict(zip(names, sizes, strict=True)), name, Link.of(link))


def axis_of(axes: Mapping[str, int]) -> AxisName:
    """The name of the only axis, or the names of all."""
    names = tuple(axes)
    return names[0] if len(names) == 1 else names


def like_of(owner: str, params: PyTree) -> PyTree:
    """The shapes of parameters, in float32."""
    _bucketing.check_tree(owner, "params", params)
    if not count(params):
        raise ValueError(
            f"{owner}(params): must have values, got none; pass the parameters, or their shapes."
        )
    return _bucketing.like(params)


def count(params: PyTree) -> int:
    """Number of values."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def smaller(params: PyTree, share: float) -> PyTree:
    """A share of a model, with matrices of the same form."""

    def small(leaf: Any) -> Any:
        by = share ** (1 / max(1, sum(rows > 1 for rows in leaf.shape)))
        shape = tuple(max(1, round(rows * by)) for rows in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(small, params)


def heavy_tailed(like: PyTree) -> list[PyTree]:
    """Two trees of heavy-tailed values, as gradients have them."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), (2, len(leaves)))
    trees = [jax.tree.unflatten(structure, row) for row in keys]
    draw = lambda x, key: (jax.random.normal(key, x.shape) ** 3 * 1e-3).astype(x.dtype)  # noqa: E731
    return [jax.tree.map(draw, like, tree) for tree in trees]
