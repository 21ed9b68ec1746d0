"""Whose row of the state this is: which worker of how many, which must be the worker's own.

The number is there because rows may be cut off, and those that are left have the right index.
"""

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree
from fftgrad.exchanges._per_worker import PerWorker, add_worker_axis, drop_worker_axis
from fftgrad.ops import _finite

UNKNOWN = -1


def unowned(*states: PyTree) -> PerWorker:
    """The row before the first step; nothing, where no worker has anything of its own."""
    nodes = jax.tree.leaves(states, is_leaf=_is_own)
    has_own = any(_is_own(node) and jax.tree.leaves(node) for node in nodes)
    return add_worker_axis(jnp.full(2, UNKNOWN, jnp.int32)) if has_own else PerWorker(())


def check_owner(row: PerWorker, axis_name: AxisName) -> tuple[jax.Array | None, PerWorker]:
    """Whether the state is this worker's, bool[], and its row from now on.

    None where there is nothing that could be another's.
    """
    if not jax.tree.leaves(row):
        return None, row
    found: jax.Array = drop_worker_axis(row)
    own = jnp.stack([_axes.index(axis_name), _axes.size(axis_name)]).astype(jnp.int32)
    unknown = jnp.all(found == UNKNOWN)
    mine = unknown | jnp.all(found == own)
    return mine, add_worker_axis(jnp.where(unknown, own, found))


def nan_unless(mine: jax.Array | None, tree: PyTree) -> PyTree:
    """The tree; NaN where the state is another worker's, which all workers will then see."""
    return tree if mine is None else _finite.nan_unless(mine, tree)


def _is_own(node: object) -> bool:
    return isinstance(node, PerWorker)
