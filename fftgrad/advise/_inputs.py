"""What a plan is given, looked at before anything long begins: one place for each kind of input."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from fftgrad import _axes
from fftgrad._axes import AxisName
from fftgrad._contracts import PyTree
from fftgrad._values import check_count
from fftgrad.advise._gradients import Array, GradientLog
from fftgrad.advise._link import Link
from fftgrad.exchanges import _layout
from fftgrad.ops._shapes import by_path

AXIS, SLOW, FAST = "data", "slow", "fast"
BUCKETS = 8
"""Of what is traced of a model that is larger."""
SUBNORMAL = float(np.nextafter(np.finfo(np.float32).tiny, np.float32(0)))


class Groups(NamedTuple):
    """How workers are joined."""

    axes: Mapping[str, int]  # how many there are along each axis, the slow one first
    axis_name: AxisName  # by which a step calls them
    fast: Link | None  # the link of the second axis, if there is one

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
    fast: tuple[int, Link] | None,
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
    sizes = (workers // joined, joined)
    return Groups(dict(zip(names, sizes, strict=True)), name, Link.of(link))


def like_of(owner: str, params: PyTree) -> PyTree:
    """The shapes of parameters, in float32."""
    _layout.check_tree(owner, "params", params)
    if not count(params):
        raise ValueError(
            f"{owner}(params): must have values, got none; pass the parameters, or their shapes."
        )
    return _layout.like(params)


def count(params: PyTree) -> int:
    """How many values they have."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def smaller(params: PyTree, share: float) -> PyTree:
    """A share of a model, with matrices of the same form."""

    def small(leaf: Any) -> Any:
        by = share ** (1 / max(1, sum(rows > 1 for rows in leaf.shape)))
        shape = tuple(max(1, round(rows * by)) for rows in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(small, params)


def part(params: PyTree) -> tuple[PyTree, int]:
    """A model of few buckets, and how many of it send what this one sends.

    A trace grows with the buckets. They are alike where every matrix is longer than one and cut.
    """
    limit = _layout.BUCKET_LIMIT
    times = -(-count(params) // (BUCKETS * limit))
    matrices = (leaf for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1)
    if times == 1 or any(math.prod(leaf.shape) <= limit for leaf in matrices):
        return params, 1
    return smaller(params, 1 / times), times


def gradients_of(owner: str, given: object, like: PyTree) -> list[PyTree] | None:
    """Gradients as arrays, in the containers of the parameters; of a log, all there are."""
    if isinstance(given, GradientLog):
        given = given.trees
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, str)):
        raise TypeError(
            f"{owner}(gradients): must be a list of trees like params, got "
            f"{type(given).__name__}; pass [gradient]."
        )
    wanted = {name: leaf.shape for name, leaf in by_path(like).items()}
    found: list[PyTree] = []
    for tree in given or ():
        own = arrays_of(owner, tree)
        shapes = {name: leaf.shape for name, leaf in own.items()}
        if shapes != wanted:
            name = min(dict(shapes.items() ^ wanted.items()))
            raise ValueError(
                f"{owner}(gradients): must be trees like params, got one that differs at {name!r}, "
                f"where params have {wanted.get(name, 'nothing')} and it has "
                f"{shapes.get(name, 'nothing')}; pass a list of gradients of these parameters."
            )
        leaves = [narrow(own[name]) for name in wanted]
        check_values(owner, leaves, SUBNORMAL)
        found.append(jax.tree.unflatten(jax.tree.structure(like), list(map(jnp.asarray, leaves))))
    return found or None


def arrays_of(owner: str, tree: PyTree, where: str = "") -> dict[str, Array]:
    """The leaves of a gradient by their paths."""
    named = by_path(tree)
    if any(isinstance(leaf, Tracer) for leaf in named.values()):
        raise TypeError(
            f"{owner}(gradients): must be concrete arrays, got a traced one{where}; call it "
            "outside of jax.jit."
        )
    arrays = {name: np.asarray(leaf) for name, leaf in named.items()}
    for name, leaf in arrays.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{owner}(gradients): must be of floating-point values, got {leaf.dtype} for "
                f"{name or 'the array'}{where}; cast it, or leave it out."
            )
    return arrays


def narrow(x: Array) -> Array:
    """In float32 what no gradient is, such as float64."""
    with np.errstate(over="ignore"):  # which is then not finite
        return x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(np.float32)


def check_finite(owner: str, x: Array, where: str = "") -> None:
    """Refuses what float32 does not hold."""
    if bad := int(np.sum(~np.isfinite(x))):
        raise ValueError(
            f"{owner}(gradients): must be finite in float32, got {bad} values that are not{where}; "
            "leave that step out."
        )


def check_values(owner: str, leaves: Sequence[Array] | Array, above: float = 0.0) -> None:
    """Refuses values of which there is no relative error: not finite, or all as good as zero."""
    for leaf in leaves:
        check_finite(owner, leaf)
    if not any(np.any(np.abs(leaf.astype(np.float32)) > above) for leaf in leaves):
        raise ValueError(
            f"{owner}(gradients): must not be all zero, got only zeros"
            f"{', or subnormal values' if above else ''}; leave it out."
        )
