"""What a plan is given, looked at before anything long begins: one place for each kind of input."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad.advise._gradient_log import GradientLog
from fftgrad.advise._link import Link
from fftgrad.exchanges import _layout

AXIS, SLOW, FAST = "data", "slow", "fast"
LEAST = np.finfo(np.float32).tiny

Fast = tuple[int, Link]
"""How many workers fast links join, and their link."""


class Groups(NamedTuple):
    """How workers are joined.

    Attributes:
      axes: how many there are along each axis, the slow one first.
      axis_name: by which a step calls them.
      fast: the link of the second axis, if there is one.
    """

    axes: Mapping[str, int]
    axis_name: AxisName
    fast: Link | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many workers there are along each axis."""
        return tuple(self.axes.values())

    @property
    def workers(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    @property
    def slow(self) -> str:
        """The axis of the slow links."""
        return next(iter(self.axes))

    def links(self, slow: Link) -> Link | dict[str, Link]:
        """The link of all, or that of each axis."""
        return slow if self.fast is None else dict(zip(self.axes, (slow, self.fast), strict=True))


def groups(
    owner: str,
    workers: int | None,
    fast: Fast | None,
    axis_name: AxisName | None,
    mesh: Mesh | None = None,
) -> Groups:
    """The workers and their axes; as many as the mesh has, unless it is said."""
    name = (AXIS if fast is None else (SLOW, FAST)) if axis_name is None else axis_name
    _axes.check_names(f"{owner}(axis_name)", name)
    if mesh is not None:
        _axes.check_mesh(f"{owner}(axis_name)", mesh, name)
        workers = _axes.mesh_size(mesh, name) if workers is None else workers
    workers = check_count(f"{owner}(workers)", workers, "one exchanges nothing.", least=2)
    if fast is None:
        # All that a flat exchange knows of several axes is how many workers they have together.
        return Groups({name if isinstance(name, str) else AXIS: workers}, name, None)
    given: object = fast
    if not isinstance(given, tuple) or len(fast) != 2:
        raise TypeError(
            f"{owner}(fast): must be how many workers fast links join, and their link, got "
            f"{given!r}; use (8, fg.advise.Link('50GB/s', '10us'))."
        )
    joined, link = fast
    check_count(f"{owner}(fast)", joined, "leave it out where no links are fast.", least=2)
    if workers % joined:
        raise ValueError(
            f"{owner}(fast): must be a divisor of the {workers} workers, got {joined}; leave it "
            "out where no links are fast."
        )
    if workers == joined:
        raise ValueError(
            f"{owner}(fast): must leave two groups at least, got all {workers} workers in one, "
            "which send nothing over a slow link; leave it out and give their link as link."
        )
    names = _axes.names(name)
    if len(names) != 2:
        raise ValueError(
            f"{owner}(axis_name): must name the slow axis and the fast one, got {name!r}; use "
            "('slow', 'fast')."
        )
    if mesh is not None and mesh.shape[names[1]] != joined:
        raise ValueError(
            f"{owner}(fast): must join as many workers as the mesh has along {names[1]!r}, got "
            f"{joined} for {mesh.shape[names[1]]}; use a mesh of {workers // joined} x {joined}."
        )
    return Groups(dict(zip(names, (workers // joined, joined), strict=True)), name, link_of(link))


def check_count(argument: str, value: object, remedy: str, least: int = 1) -> int:
    """Refuses what is no number of workers, of steps, or of buckets."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{argument}: must be a whole number, got {value!r}; {remedy}")
    if value < least:
        raise ValueError(f"{argument}: must be at least {least}, got {value}; {remedy}")
    return int(value)


def link_of(link: Link | str | float) -> Link:
    """A link, or that of a bandwidth alone."""
    return link if isinstance(link, Link) else Link(link)


def like_of(owner: str, params: PyTree) -> PyTree:
    """The shapes of parameters, in float32."""
    _layout.check_tree(owner, "params", params)
    if not sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"{owner}(params): must have values, got none; pass the parameters, or their shapes."
        )
    return _layout.like(params)


def gradients_of(owner: str, given: object, like: PyTree) -> list[PyTree] | None:
    """Gradients like the parameters; of what was captured, those of all steps and workers."""
    if isinstance(given, GradientLog):
        given = [tree for workers in given.gradients.values() for tree in workers.values()]
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, str)):
        raise TypeError(
            f"{owner}(gradients): must be a list of trees like params, got "
            f"{type(given).__name__}; pass [gradient]."
        )
    return [_gradient(owner, tree, like) for tree in given] if given else None


def _gradient(owner: str, tree: object, like: PyTree) -> PyTree:
    """A gradient as arrays, in the containers of the parameters."""
    wanted, own = _named(like), _named(tree)
    shapes = [{name: np.shape(leaf) for name, leaf in leaves.items()} for leaves in (wanted, own)]
    if shapes[0] != shapes[1]:
        differ = sorted(dict(shapes[0].items() ^ shapes[1].items()))
        raise ValueError(
            f"{owner}(gradients): must be trees like params, got one that differs at "
            f"{differ[0]!r}, where params have {shapes[0].get(differ[0], 'nothing')} and it has "
            f"{shapes[1].get(differ[0], 'nothing')}; pass a list of gradients of these parameters."
        )
    leaves = [_values(f"{owner}(gradients)", own[name]) for name in wanted]
    if not any(np.any(np.abs(leaf.astype(np.float32)) >= LEAST) for leaf in leaves):
        raise ValueError(
            f"{owner}(gradients): must not be zeros, of which there is no relative error, got one "
            "of zeros or subnormal values alone; leave it out."
        )
    return jax.tree.unflatten(jax.tree.structure(like), list(map(jnp.asarray, leaves)))


def _values(argument: str, leaf: Any) -> np.ndarray[Any, Any]:
    """The values of a leaf, in float32 where a gradient's dtype cannot be wider."""
    values = np.asarray(leaf)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(
            f"{argument}: must be of floating-point values, got {values.dtype}; cast them."
        )
    if values.dtype not in (jnp.bfloat16, jnp.float16):
        with np.errstate(over="ignore"):  # which is then not finite
            values = values.astype(np.float32)
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"{argument}: must be finite in float32, got a value that is not; leave out the steps "
            "that overflowed."
        )
    return values


def _named(tree: object) -> dict[str, Any]:
    """The leaves by their paths, as files name them."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
